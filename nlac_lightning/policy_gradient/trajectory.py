"""Whole episodes as the tokens that an agent drew and the prompts before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import Roles


@dataclass(frozen=True)
class Segment:
    """One turn: its prompt and the sampled completion.

    Attributes:
        ids: prompt and completion; only ``ids[start:]`` was drawn.
        start: first drawn position.
    """

    ids: tuple[int, ...]
    start: int

    def __len__(self) -> int:
        """Number of drawn tokens."""
        return len(self.ids) - self.start


@dataclass(frozen=True)
class Trajectory:
    """One episode for policy gradients.

    Per-token values of a trajectory are arrays over the drawn tokens of all its turns, in order.

    Attributes:
        segments: its turns, those excepted that were not sampled from the model.
        logprobs: [n] log-probability of each token when it was drawn, with its temperature.
        rewards: [n] reward after each token.
        total_reward: sum of all rewards of the episode.
        truncated: it was cut by a limit, not ended by the task's own rules.
        final_ids: the state after the last turn.
        policy_version: oldest adapter version that acted.
    """

    episode_id: int
    task_id: str
    segments: tuple[Segment, ...]
    logprobs: np.ndarray
    rewards: np.ndarray
    total_reward: float
    truncated: bool
    final_ids: tuple[int, ...]
    policy_version: int

    def __len__(self) -> int:
        """Number of drawn tokens."""
        return len(self.logprobs)


def make_trajectories(batch: Sequence[Transition], roles: Roles) -> list[Trajectory]:
    """The episodes of a batch, in the order of their first appearance; it has to hold them whole.

    A turn's reward goes to its last token; that of a turn without sampled tokens to the last one
    before it.
    """
    episodes: dict[int, list[Transition]] = {}
    for transition in batch:
        episodes.setdefault(transition.episode_id, []).append(transition)
    return [_trajectory(turns, roles) for turns in episodes.values()]


def _trajectory(turns: list[Transition], roles: Roles) -> Trajectory:
    segments: list[Segment] = []
    logprobs: list[float] = []
    rewards: list[float] = []
    for x in turns:
        if x.turn.logprobs:
            prompt = roles.prompt("policy", x.state_ids, x.state_messages).ids
            segments.append(Segment(prompt + x.turn.action_ids, len(prompt)))
            logprobs += x.turn.logprobs
            rewards += [0.0] * len(x.turn.logprobs)
        if rewards:
            rewards[-1] += x.turn.reward
    return Trajectory(
        episode_id=turns[0].episode_id,
        task_id=turns[0].task_id,
        segments=tuple(segments),
        logprobs=np.asarray(logprobs),
        rewards=np.asarray(rewards),
        total_reward=turns[0].episode_reward,
        truncated=turns[-1].turn.truncated and not turns[-1].turn.terminated,
        final_ids=turns[-1].next_state_ids,
        policy_version=min(x.turn.policy_version for x in turns),
    )
