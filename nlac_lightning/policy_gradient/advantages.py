"""Advantages: how much better an action was than expected. Plain float64 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Array = np.ndarray

STD_FLOOR = 1e-4
"""Added to a group's standard deviation, so that equal rewards give zero and not infinity."""


def gae(
    rewards: Array, values: Array, bootstrap: float, gamma: float, lam: float
) -> tuple[Array, Array]:
    """Generalised advantage estimation over the agent's tokens of a whole episode.

    Only the agent's tokens are steps: the value after a turn's last token is that before the next
    turn's first one, so the return flows through what the environment wrote in between.

    Args:
        rewards: [n] reward after each token; a turn's reward is at its last one.
        values: [n] value before each token.
        bootstrap: value after the last token; 0 for an episode that terminated.
        gamma, lam: discount and trace decay per token, in [0, 1].

    Returns:
        Advantages [n] and returns [n] (advantage plus value, what the value head learns).

    Source: arXiv 1506.02438, equation 16.
    """
    advantages = np.zeros(len(rewards))
    after, trace = bootstrap, 0.0
    for i in reversed(range(len(rewards))):
        trace = rewards[i] + gamma * after - values[i] + gamma * lam * trace
        advantages[i] = trace
        after = values[i]
    return advantages, advantages + values


def group_advantages(rewards: Sequence[float], scale: Literal["std", "none"] = "std") -> Array:
    """Reward of each episode of a group relative to the group's mean.

    Args:
        rewards: [n] total rewards of episodes of one task.
        scale: ``std`` divides by the (sample) standard deviation (GRPO, arXiv 2402.03300,
            section 4.1.2); ``none`` does not (Dr. GRPO, arXiv 2503.20783, section 3.2), so that
            tasks that nearly always succeed or fail get no extra weight.

    Returns:
        [n]; zeros where all rewards are equal or there is only one.
    """
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    if scale == "none" or len(values) < 2:
        return centred
    return centred / (values.std(ddof=1) + STD_FLOOR)


def normalise(advantages: Sequence[Array]) -> list[Array]:
    """Shift and scale to mean 0 and standard deviation 1 over all tokens of all episodes."""
    if not advantages:
        return []
    everything = np.concatenate(advantages)
    spread = everything.std() + 1e-8
    return [(a - everything.mean()) / spread for a in advantages]
