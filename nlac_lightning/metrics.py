"""Metrics with intervals: success, critic fidelity, effect of refinement.

Each metric is a pure function over plain values; the :class:`torchmetrics.Metric` classes
accumulate its inputs, across processes too. All intervals are at 95% unless told otherwise.
They take observations as independent. Steps of one episode are not quite that, so intervals over
steps are somewhat narrow, above all where every step of an episode has the same label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Interval(NamedTuple):
    """An estimate with its confidence limits."""

    value: float
    low: float
    high: float

    def flat(self, name: str) -> dict[str, float]:
        """The three numbers under ``name``, ``name_low`` and ``name_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Share of successes with Wilson's score interval.

    Args:
        successes: count in 0..n; not whole where each trial is itself a mean of several.
        n: number of trials; with 0 the value is nan and the interval [0, 1].
        confidence: coverage in (0, 1).

    Raises:
        ValueError: ``successes`` or ``confidence`` is out of range.
    """
    z = _normal_quantile(confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..{n}, got {successes}")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    p = successes / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The limits touch 0 and 1 exactly at the ends; rounding would miss them by an ulp.
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == n else center + half
    return Interval(p, low, high)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean with Student's t interval.

    One value has an unbounded interval; no value has a nan mean as well.
    """
    _normal_quantile(confidence)
    if not values:
        return Interval(math.nan, -math.inf, math.inf)
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def auroc(scores: Sequence[float], labels: Sequence[bool], confidence: float = 0.95) -> Interval:
    """Probability that a positive outscores a negative, ties counting one half (Mann-Whitney).

    The interval inverts the score test with the variance of Hanley and McNeil (1982), taken at the
    tested value as Wilson's does. Hence it stays wide for few examples even when the estimate is
    0 or 1, or when all scores are equal; with many ties it is conservative.

    Args:
        scores: any finite numbers, one per label.
        labels: with only one class present the value is nan and the interval [0, 1].
        confidence: coverage in (0, 1).

    Raises:
        ValueError: lengths differ, or a score is nan.
    """
    z = _normal_quantile(confidence)
    pairs = sorted(zip(scores, labels, strict=True), key=lambda pair: pair[0])
    if any(math.isnan(score) for score in scores):
        raise ValueError("a score is nan: it has no rank")
    positives = sum(bool(label) for label in labels)
    negatives = len(pairs) - positives
    if not positives or not negatives:
        return Interval(math.nan, 0.0, 1.0)

    wins, below = 0.0, 0  # ``below``: negatives with a smaller score
    for _, tied in groupby(pairs, key=lambda pair: pair[0]):
        group = [bool(label) for _, label in tied]
        ups = sum(group)
        downs = len(group) - ups
        wins += ups * (below + downs / 2)
        below += downs
    area = wins / (positives * negatives)

    def outside(a: float) -> bool:
        """Whether the test at this confidence rejects ``a``."""
        spread = 1 + (positives - 1) * (1 - a) / (2 - a) + (negatives - 1) * a / (1 + a)
        return (a - area) ** 2 > z * z * a * (1 - a) * spread / (positives * negatives)

    return Interval(area, _boundary(0.0, area, outside), _boundary(1.0, area, outside))


def binary_fidelity(
    scores: Sequence[float], verdicts: Sequence[bool | None], labels: Sequence[bool]
) -> dict[str, float]:
    """How well verdicts and scores agree with labels.

    Args:
        scores: belief in [0, 1] that the label is true, nan where there is none.
        verdicts: True, False, or None where the critic could not be parsed.
        labels: the truth, as long as the other two.

    Returns:
        ``accuracy`` (with ``_low``, ``_high``), ``balanced_accuracy`` (mean of the accuracies on
        either class) and ``positive_share``, all over the verdicts that could be parsed;
        ``auroc`` (with ``_low``, ``_high``) over the scores that are not nan; ``unparsable``,
        share of all; ``base_rate``, share of true labels; ``n``. What has no data is nan.

    Raises:
        ValueError: lengths differ, or a score is outside [0, 1].
    """
    rows = list(zip(scores, verdicts, labels, strict=True))
    if any(score < 0 or score > 1 for score in scores):
        raise ValueError("scores must lie in [0, 1] or be nan")
    parsed = [(verdict, bool(label)) for _, verdict, label in rows if verdict is not None]
    ranked = [(score, bool(label)) for score, _, label in rows if not math.isnan(score)]
    hits = sum(verdict == label for verdict, label in parsed)
    recalls = [
        _share([verdict == label for verdict, label in parsed if label is side])
        for side in (True, False)
    ]
    return {
        **wilson_interval(hits, len(parsed)).flat("accuracy"),
        "balanced_accuracy": fmean(recalls),
        **auroc([score for score, _ in ranked], [label for _, label in ranked]).flat("auroc"),
        "positive_share": _share([verdict for verdict, _ in parsed]),
        "unparsable": _share([verdict is None for verdict in verdicts]),
        "base_rate": _share(labels),
        "n": float(len(rows)),
    }


def refinement_effect(base: Sequence[bool], refined: Sequence[bool]) -> dict[str, float]:
    """What refinement does to actions whose correctness is known.

    Args:
        base: whether each action was right before.
        refined: whether it was right after, as long as ``base``.

    Returns:
        Of the wrong actions (``n_wrong``) the shares ``wrong_to_right`` and ``kept_wrong``; of the
        right ones (``n_right``) ``right_to_wrong`` and ``kept_right``; each with ``_low`` and
        ``_high``, nan and [0, 1] without data.

    Raises:
        ValueError: lengths differ.
    """
    pairs = list(zip(base, refined, strict=True))
    from_wrong = [bool(after) for before, after in pairs if not before]
    from_right = [bool(after) for before, after in pairs if before]
    n_wrong, n_right = len(from_wrong), len(from_right)
    fixed, kept = sum(from_wrong), sum(from_right)
    return {
        **wilson_interval(fixed, n_wrong).flat("wrong_to_right"),
        **wilson_interval(n_wrong - fixed, n_wrong).flat("kept_wrong"),
        **wilson_interval(n_right - kept, n_right).flat("right_to_wrong"),
        **wilson_interval(kept, n_right).flat("kept_right"),
        "n_wrong": float(n_wrong),
        "n_right": float(n_right),
    }


class SuccessRate(Metric):
    """Share of successful episodes: ``success``, ``success_low``, ``success_high``, ``n``."""

    full_state_update = False
    higher_is_better = True
    successes: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("successes", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, success: bool) -> None:
        """Count one episode."""
        self.successes += int(success)
        self.total += 1

    def compute(self) -> dict[str, float]:
        """See :func:`wilson_interval`."""
        n = int(self.total)
        return {**wilson_interval(int(self.successes), n).flat("success"), "n": float(n)}


class BinaryFidelity(Metric):
    """:func:`binary_fidelity` over all that was seen, on all processes."""

    full_state_update = False
    rows: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, score: float, verdict: bool | None, label: bool) -> None:
        """Add one critique: its score in [0, 1] or nan, its verdict or None, and the truth."""
        assert isinstance(self.rows, list)
        verdict_code = math.nan if verdict is None else float(verdict)
        # Flat, since a process without rows sends a flat empty tensor and ranks must agree.
        row = [float(score), verdict_code, float(label)]
        self.rows.append(torch.tensor(row, device=self.device))

    def compute(self) -> dict[str, float]:
        """See :func:`binary_fidelity`."""
        parts = self.rows if isinstance(self.rows, list) else [self.rows]
        rows = [row for part in parts for row in part.reshape(-1, 3).tolist()]
        return binary_fidelity(
            [score for score, _, _ in rows],
            [None if math.isnan(verdict) else bool(verdict) for _, verdict, _ in rows],
            [bool(label) for _, _, label in rows],
        )


class RefinementEffect(Metric):
    """:func:`refinement_effect` over all that was seen, on all processes."""

    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        # counts[base right][refined right]
        self.add_state("counts", torch.zeros(2, 2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, base_right: bool, refined_right: bool) -> None:
        """Add one action that was refined."""
        self.counts[int(base_right), int(refined_right)] += 1

    def compute(self) -> dict[str, float]:
        """See :func:`refinement_effect`."""
        pairs = [
            (bool(before), bool(after))
            for before in (0, 1)
            for after in (0, 1)
            for _ in range(int(self.counts[before, after]))
        ]
        return refinement_effect([before for before, _ in pairs], [after for _, after in pairs])


def _share(flags: Sequence[bool]) -> float:
    return fmean(map(float, flags)) if flags else math.nan


def _normal_quantile(confidence: float) -> float:
    """The z with ``confidence`` of a standard normal between -z and z."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _t_quantile(confidence: float, df: int) -> float:
    """The t with ``confidence`` of Student's distribution between -t and t."""
    theta = _boundary(math.pi / 2, 0.0, lambda angle: _t_mass(angle, df) > confidence)
    return math.sqrt(df) * math.tan(theta)


def _t_mass(theta: float, df: int) -> float:
    """Mass between -t and t for t = sqrt(df) tan(theta): the finite series for integer ``df``."""
    odd = df % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for power in range(odd, df - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(theta) ** 2
    mass = math.sin(theta) * total
    return 2 / math.pi * (theta + mass) if odd else mass


def _boundary(outer: float, inner: float, outside: Callable[[float], bool]) -> float:
    """Where ``outside`` turns from true near ``outer`` to false at ``inner``, by bisection."""
    for _ in range(60):
        middle = (outer + inner) / 2
        if outside(middle):
            outer = middle
        else:
            inner = middle
    return (outer + inner) / 2
