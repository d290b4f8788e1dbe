"""What algorithms share that play real futures of an action instead of predicting them."""

from __future__ import annotations

from typing import Any

from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.errors import require_positive
from nlac_lightning.futures import Futures
from nlac_lightning.rollout import RolloutLimits


class PlaysFutures(NLAC):
    """NLAC's parts, with several on-policy rollouts from a state-action to read in context.

    Args:
        rollouts: rollouts of each state-action; they are counted as environment episodes.
        limits: their bounds; use those of the task's RolloutCallback.
        options: see :class:`~nlac_lightning.algorithms.nlac.NLAC`.
    """

    def __init__(
        self, rollouts: int = 4, limits: RolloutLimits | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        require_positive("model.rollouts", rollouts)
        self.rollouts, self.limits = rollouts, limits or RolloutLimits()
        self.futures: Futures

    def configure_model(self) -> None:
        super().configure_model()
        self.futures = Futures(
            self.env, self.roles, self.generator, self.rollouts, self.limits, self.counts
        )
