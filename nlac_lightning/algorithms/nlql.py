"""NLQL (ablation of arXiv 2512.04601): the critic chooses, nothing is refined."""

from __future__ import annotations

from typing import Any

from nlac_lightning.algorithms.nlac import NLAC


class NLQL(NLAC):
    """NLAC's critic; of ``n`` actions that the policy draws, it learns the one that is judged best.

    Args:
        n: actions that are drawn in each state.
        options: see :class:`~nlac_lightning.algorithms.nlac.NLAC`.

    Source: arXiv 2512.04601, ablations ("NLQL").
    """

    def __init__(self, n: int = 4, **options: Any) -> None:
        super().__init__(improvement="best_of_n", base_action="fresh", m=1, n=n, **options)
