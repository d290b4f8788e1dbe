"""Scores of solutions: accuracy, pass@k, format failures, length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb
from statistics import fmean

from nlac_lightning.replay.episode import Episode


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of ``k`` of ``n`` samples is right, drawn without replacement.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    Raises:
        ValueError: unless 0 <= correct <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} right ones in {n} is not defined")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def scores(episodes: Sequence[Episode], ks: Sequence[int] = (1,)) -> dict[str, float]:
    """Mean over problems of ``accuracy`` and ``pass@k``; over solutions of the rest.

    ``format_failures`` is the share without a boxed answer, ``length`` the tokens of a solution;
    ``pass@k`` leaves out problems with fewer than k solutions.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        right[episode.task_id].append(episode.total_reward > 0)
    nan = float("nan")
    result = {"accuracy": fmean(map(fmean, right.values())) if right else nan}
    for k in ks:
        shares = [pass_at_k(len(r), sum(r), k) for r in right.values() if len(r) >= k]
        result[f"pass@{k}"] = fmean(shares) if shares else nan
    turns = [turn for episode in episodes for turn in episode.turns]
    valid = [bool(turn.info.get("valid", True)) for turn in turns]
    result["format_failures"] = 1.0 - fmean(valid) if valid else nan
    result["length"] = fmean(len(turn.action_ids) for turn in turns) if turns else nan
    return result
