"""PPO and GRPO learn: a bandit over words is solved within seconds."""

from typing import Any

import pytest

from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.ppo import PPO

SETTINGS: dict[str, tuple[type, int, dict[str, Any]]] = {
    "ppo": (PPO, 32, {"episodes": 32, "minibatches": 1, "epochs": 2}),
    "dapo": (GRPO, 12, {"groups": 2, "group_size": 16, "normalisation": "token",
                        "clip_high": 0.28, "dynamic_sampling": True, "truncated": "mask"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_learns_which_words_are_good(bench: Any, name: str) -> None:
    algorithm, steps, options = SETTINGS[name]
    metrics, _ = bench.fit(bench.build(algorithm, **options), steps)
    rewards = [step["reward"] for step in metrics]
    assert rewards[0] < 0.7, "the task must not be solved at the start"
    assert sum(rewards[-2:]) / 2 > 0.9, rewards
