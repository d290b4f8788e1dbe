"""The curriculum: training tasks grow from the first ones to all."""

import pytest

from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError


def test_tasks_grow_in_the_environments_order():
    callback = RolloutCallback(initial_episodes=40, initial_tasks=5, curriculum=100)
    callback._tasks = [Task(f"{i}", "train") for i in range(25)]
    numbers = [int(callback._job(n)[0].id) for n in range(400)]
    assert set(numbers[:40]) == set(range(5))
    for n in range(40, 140):
        assert numbers[n] < 5 + 20 * (n - 40) / 100 + 1
    assert max(numbers[90:140]) > 12
    assert set(numbers[140:]) == set(range(25))


def test_a_curriculum_needs_a_start():
    with pytest.raises(ConfigError, match=r"rollout\.curriculum"):
        RolloutCallback(curriculum=10)
