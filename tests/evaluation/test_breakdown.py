"""Estimators against brute force, groups and table against counts by hand."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest

from nlac_lightning.evaluation.breakdown import breakdown, breaks_down, pass_at_k, pass_hat_k
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.metrics import wilson_interval
from nlac_lightning.report.evaluation import write_comparison

STEP = StepRecord("look()", tool_error=False)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_estimators_equal_the_mean_over_all_subsets(n: int) -> None:
    for successes in range(n + 1):
        trials = [i < successes for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(trials, k))
            assert pass_hat_k(n, successes, k) == pytest.approx(fmean(map(all, subsets)))
            assert pass_at_k(n, successes, k) == pytest.approx(fmean(map(any, subsets)))


def episode(task: str, success: bool, *steps: StepRecord, **fields: object) -> EpisodeRecord:
    values = {"reason": "solved", "facts": {"masks": [], "gold_writes": 1}} | fields
    return EpisodeRecord(
        task, "test", "base", success, float(success), list(steps or (STEP,)), tokens=5, **values
    )


NOTHING = {"masks": ["do_nothing"], "gold_writes": 0}
FIVE = {"masks": ["order_sensitive"], "gold_writes": 5}
RESULT = EvaluationResult(
    "base",
    "test",
    [
        episode("a", True),
        episode("a", False, STEP, StepRecord("look(", valid=False)),
        episode("b", True, StepRecord("look()", tool_error=True), facts=NOTHING),
        episode("b", True, facts=NOTHING),
        episode("c", False, facts=FIVE, reason="user_failed"),
        episode("c", False, facts=FIVE),
    ],
    "tau2/retail",
)


def test_groups_rates_and_estimates() -> None:
    found = breakdown(RESULT)
    successes = {name: (g["tasks"], g["success"]) for name, g in found["groups"].items()}
    assert successes == {
        "all tasks": (3, 0.5),
        "where something has to be done": (2, 0.25),
        "solved by doing nothing": (1, 1.0),
        "0 gold writes": (1, 1.0),
        "1 gold writes": (1, 0.5),
        "3 or more gold writes": (1, 0.0),
        "order-sensitive": (1, 0.0),
    }
    assert found["pass^k"] == pytest.approx({"1": 0.5, "2": 1 / 3})
    assert found["pass@k"] == pytest.approx({"1": 0.5, "2": 2 / 3})
    assert found["tool_error_rate"] == pytest.approx(1 / 6)
    assert found["invalid_rate"] == pytest.approx(1 / 7)
    assert found["mean_turns"] == pytest.approx(7 / 6) and found["user_failures"] == 1
    whole = found["groups"]["all tasks"]
    assert (whole["low"], whole["high"]) == wilson_interval(1.5, 3)[1:]


def test_the_file_and_the_table_say_the_same(tmp_path: Path) -> None:
    table = write_comparison(tmp_path, [RESULT])
    assert "tau2/retail, test" in table and "solved by doing nothing" in table
    assert "pass^2" in table and "0.33" in table
    data = json.loads((tmp_path / "breakdown.json").read_text())
    assert data["policies"]["base"] == breakdown(RESULT)


def test_without_facts_and_trials_nothing_is_added(tmp_path: Path) -> None:
    plain = EvaluationResult("base", "test", [episode("a", True, facts={})], "desk")
    assert not breaks_down(plain)
    write_comparison(tmp_path, [plain])
    assert not (tmp_path / "breakdown.json").exists()


def test_records_survive_json() -> None:
    again = EvaluationResult.from_json(RESULT.to_json())
    assert breakdown(again) == breakdown(RESULT)
