"""Metrics against independent references: brute force, exact tails, published values, peers."""

import math
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from nlac_lightning.metrics import (
    BinaryFidelity,
    Interval,
    RefinementEffect,
    SuccessRate,
    auroc,
    binary_fidelity,
    mean_interval,
    refinement_effect,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, n)
    assert interval.value == pytest.approx(successes / n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_wilson_limits_solve_the_score_test() -> None:
    for n in (1, 7, 40):
        for successes in range(n + 1):
            value, *limits = wilson_interval(successes, n, confidence=0.9)
            for limit in limits:
                assert abs(value - limit) == pytest.approx(
                    1.6448536 * math.sqrt(limit * (1 - limit) / n), abs=1e-6
                )


def test_wilson_edges() -> None:
    assert math.isnan(wilson_interval(0, 0).value)
    assert wilson_interval(0, 0)[1:] == (0.0, 1.0)
    assert wilson_interval(5, 5).high == 1.0
    for bad in ((-1, 5, 0.95), (6, 5, 0.95), (1, 5, 0.0), (1, 5, 1.0)):
        with pytest.raises(ValueError):
            wilson_interval(*bad)


@pytest.mark.parametrize(
    ("df", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (30, 2.04227), (120, 1.97993)],
)
def test_mean_interval_uses_students_t(df: int, t: float) -> None:
    values = [float(i % 5) for i in range(df + 1)]
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / df / (df + 1))
    interval = mean_interval(values)
    assert interval.value == pytest.approx(mean)
    assert (interval.high - interval.value) / error == pytest.approx(t, rel=1e-5)
    assert (interval.value - interval.low) / error == pytest.approx(t, rel=1e-5)


def test_mean_interval_edges() -> None:
    assert mean_interval([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert math.isnan(mean_interval([]).value)
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)


def pair_count(scores: list[float], labels: list[bool]) -> float:
    ups = [s for s, label in zip(scores, labels, strict=True) if label]
    downs = [s for s, label in zip(scores, labels, strict=True) if not label]
    wins = [(up > down) + (up == down) / 2 for up, down in product(ups, downs)]
    return sum(wins) / len(wins) if wins else math.nan


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30))
def test_auroc_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    scores, labels = [score / 4 for score, _ in rows], [label for _, label in rows]
    interval = auroc(scores, labels)
    assert interval.value == pytest.approx(pair_count(scores, labels), nan_ok=True)
    assert 0 <= interval.low < interval.high <= 1
    if not math.isnan(interval.value):
        assert interval.low <= interval.value <= interval.high


def test_auroc_agrees_with_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (200,), generator=generator) / 8
    labels = torch.randint(0, 2, (200,), generator=generator)
    ours = auroc(scores.tolist(), labels.bool().tolist()).value
    assert ours == pytest.approx(float(binary_auroc(scores, labels)), abs=1e-6)


def test_auroc_interval_covers_the_truth() -> None:
    """Two normals one apart have area Phi(1 / sqrt 2) = 0.7602; 1000 draws, so 95% +- 1.4%."""
    rng, covered = random.Random(0), 0
    for _ in range(1000):
        labels = [i < 25 for i in range(60)]
        scores = [rng.gauss(1.0 if label else 0.0, 1.0) for label in labels]
        interval = auroc(scores, labels)
        covered += interval.low <= 0.7602 <= interval.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_auroc_interval_stays_wide_where_the_estimate_is_extreme() -> None:
    perfect = auroc([0.1, 0.2, 0.8, 0.9], [False, False, True, True])
    assert perfect.value == perfect.high == pytest.approx(1.0)
    assert perfect.low < 0.6
    constant = auroc([1.0] * 20, [i % 2 == 0 for i in range(20)])
    assert constant.value == 0.5
    assert constant.low < 0.3 and constant.high > 0.7
    assert auroc([0.5, 0.6], [True, True])[1:] == (0.0, 1.0)
    with pytest.raises(ValueError, match="nan"):
        auroc([math.nan, 0.5], [True, False])
    with pytest.raises(ValueError):
        auroc([0.5], [True, False])


ROWS: list[tuple[float, bool | None, bool]] = [
    (0.9, True, True),
    (0.8, True, True),
    (0.7, True, False),
    (0.1, False, False),
    (0.3, False, True),
    (math.nan, None, False),
]


def test_binary_fidelity_by_hand() -> None:
    scores, verdicts, labels = zip(*ROWS, strict=True)
    out = binary_fidelity(scores, verdicts, labels)
    assert out["accuracy"] == 3 / 5
    assert (out["accuracy_low"], out["accuracy_high"]) == wilson_interval(3, 5)[1:]
    assert out["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert out["auroc"] == pytest.approx(5 / 6)  # 0.3 loses to 0.7
    assert out["positive_share"] == 3 / 5
    assert out["unparsable"] == 1 / 6
    assert out["base_rate"] == 1 / 2
    assert out["n"] == 6


def test_always_good_is_visible() -> None:
    """On 90% right actions 'good' always is 90% accurate, and no better than chance."""
    labels = [i % 10 > 0 for i in range(100)]
    out = binary_fidelity([1.0] * 100, [True] * 100, labels)
    assert out["accuracy"] == 0.9
    assert out["balanced_accuracy"] == out["auroc"] == 0.5
    assert out["positive_share"] == 1.0
    assert out["auroc_low"] < 0.5 < out["auroc_high"]


def test_binary_fidelity_without_data_and_with_bad_scores() -> None:
    out = binary_fidelity([], [], [])
    assert out.pop("n") == 0
    bounds = {name: out.pop(f"{name}_{end}") for name in ("accuracy", "auroc") for end in ["low"]}
    assert bounds == {"accuracy": 0.0, "auroc": 0.0}
    assert out.pop("accuracy_high") == out.pop("auroc_high") == 1.0
    assert all(math.isnan(value) for value in out.values())
    with pytest.raises(ValueError):
        binary_fidelity([1.5], [True], [True])


PAIRS = [(True, True)] * 5 + [(True, False)] * 1 + [(False, True)] * 3 + [(False, False)] * 4


def test_refinement_effect_by_hand() -> None:
    out = refinement_effect(*zip(*PAIRS, strict=True))
    assert out["wrong_to_right"] == 3 / 7 and out["kept_wrong"] == pytest.approx(4 / 7)
    assert out["right_to_wrong"] == 1 / 6 and out["kept_right"] == pytest.approx(5 / 6)
    assert (out["n_wrong"], out["n_right"]) == (7, 6)
    assert out["wrong_to_right_low"] == wilson_interval(3, 7).low
    assert out["right_to_wrong_high"] == wilson_interval(1, 6).high
    assert math.isnan(refinement_effect([], [])["wrong_to_right"])


def test_metrics_equal_functions_and_reset() -> None:
    fidelity, effect, success = BinaryFidelity(), RefinementEffect(), SuccessRate()
    for _ in range(2):
        for row in ROWS:
            fidelity.update(*row)
        for pair in PAIRS:
            effect.update(*pair)
        for i in range(10):
            success.update(i < 3)
        scores, verdicts, labels = zip(*ROWS, strict=True)
        expected = binary_fidelity(scores, verdicts, labels)
        assert fidelity.compute() == pytest.approx(expected)
        assert effect.compute() == refinement_effect(*zip(*PAIRS, strict=True))
        assert success.compute() == {**wilson_interval(3, 10).flat("success"), "n": 10.0}
        for metric in (fidelity, effect, success):
            metric.reset()


def _worker(rank: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    fidelity, lopsided = BinaryFidelity(), BinaryFidelity()
    effect, success = RefinementEffect(), SuccessRate()
    for row in ROWS[:2] if rank == 0 else ROWS[2:]:
        fidelity.update(*row)
    for row in ROWS if rank == 1 else []:
        lopsided.update(*row)
    for pair in PAIRS[rank::2]:
        effect.update(*pair)
    success.update(rank == 0)
    metrics = (fidelity, lopsided, effect, success)
    torch.save([metric.compute() for metric in metrics], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_metrics_add_up_over_processes(tmp_path: Path) -> None:
    """Also where the parts are unequal, or one process has none."""
    command = [sys.executable, __file__, str(tmp_path)]
    workers = [subprocess.Popen([*command, str(rank)]) for rank in (0, 1)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    scores, verdicts, labels = zip(*ROWS, strict=True)
    for rank in (0, 1):
        fidelity, lopsided, effect, success = torch.load(tmp_path / f"{rank}.pt")
        expected = binary_fidelity(scores, verdicts, labels)
        assert fidelity == pytest.approx(expected)
        assert lopsided == pytest.approx(expected)
        assert effect == refinement_effect(*zip(*PAIRS, strict=True))
        assert success == {**wilson_interval(1, 2).flat("success"), "n": 2.0}


if __name__ == "__main__":  # one process of test_metrics_add_up_over_processes
    _worker(int(sys.argv[2]), sys.argv[1])
