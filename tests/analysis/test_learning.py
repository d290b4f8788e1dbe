"""Does the whole of it learn? Runs of benchmarks/learning.py with bounds, in the language MDP."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning

MANY = 10**6


@pytest.fixture(scope="module")
def evaluated():
    """A critic-only run: outcomes first, then bootstrapped targets, of a policy that stays."""
    return learning.run("evaluation", 1, 0, MANY, every=24, max_steps=96, skill_worlds=0).rows


def test_td_evaluates_a_frozen_policy(evaluated):
    first, last = evaluated[0], evaluated[-1]
    assert abs(first["spearman"]) < 0.3, "untrained, the critic knows no map"
    assert last["spearman"] > 0.4 and last["auroc"] > 0.75
    assert last["calibration"] < first["calibration"] / 2


def test_a_critic_only_phase_leaves_the_policy(evaluated):
    start = evaluated[0]["success"]
    assert all(abs(row["success"] - start) <= 0.02 for row in evaluated)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_200_steps_improve_the_policy(seed, monkeypatch):
    """Half of the benchmark's batch on the smallest world: 0.07 to 0.86 and 0.88 when written."""
    full = learning.METHODS["advantage"]
    settings = full.settings | {
        "loss": replace(full.settings["loss"], next_actions=2),
        "warmup": learning.WarmupConfig(min_steps=80),
    }
    small = replace(full, settings=settings, batch_size=48)
    monkeypatch.setitem(learning.METHODS, "small", small)
    first, last = learning.run(
        "small", 1, seed, MANY, every=200, max_steps=200, skill_worlds=0
    ).rows
    assert last["success"] > first["success"] + 0.5
    assert last["auroc"] > 0.8
