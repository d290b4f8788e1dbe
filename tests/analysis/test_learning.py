"""Does the whole of it learn? Runs of benchmarks/learning.py with bounds, in the language MDP.

    pytest -m slow tests/analysis/test_learning.py

Each takes one to two minutes on one core, so the usual run leaves them out.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MANY = 10**6


def test_td_evaluates_a_frozen_policy():
    progress = learning.run("evaluation", 2, 0, MANY, every=150, max_steps=150, skill_worlds=0)
    first, last = progress.rows[0], progress.rows[-1]
    assert abs(first["spearman"]) < 0.3, "untrained, the critic knows no map"
    assert last["spearman"] > 0.6 and last["monotone_state"] > 0.6


def test_a_critic_only_phase_leaves_the_policy():
    progress = learning.run("evaluation", 2, 1, MANY, every=20, max_steps=100, skill_worlds=0)
    start = progress.rows[0]["success"]
    assert all(abs(row["success"] - start) <= 0.02 for row in progress.rows)
    assert progress.rows[-1]["calibration"] < progress.rows[0]["calibration"] / 2


@pytest.mark.parametrize("seed", [0, 1])
def test_200_steps_improve_the_policy(seed):
    progress = learning.run("accept", 2, seed, MANY, every=200, max_steps=200, skill_worlds=0)
    assert progress.rows[-1]["success"] > progress.rows[0]["success"] + 0.3


def test_a_shuffled_critic_does_not():
    """The control: with the same costs, but critiques that belong to other actions."""
    progress = learning.run("shuffled", 2, 0, MANY, every=200, max_steps=200, skill_worlds=0)
    assert progress.rows[-1]["success"] < progress.rows[0]["success"] + 0.1
