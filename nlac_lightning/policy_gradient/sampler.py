"""Batches of whole episodes from the newest rollout, in whole groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nlac_lightning.errors import ConfigError
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.replay.buffer import Key, Outcome, ReplayBuffer
from nlac_lightning.replay.episode import FAILURES

Group = list[Outcome]


def make_groups(outcomes: Iterable[Outcome], size: int) -> list[Group]:
    """Episodes of one task, at most ``size`` together, in the order of their ids and tasks."""
    by_task: dict[str, Group] = {}
    for outcome in sorted(outcomes, key=lambda o: o.episode_id):
        by_task.setdefault(outcome.task_id, []).append(outcome)
    return [
        episodes[i : i + size]
        for _, episodes in sorted(by_task.items())
        for i in range(0, len(episodes), size)
    ]


def informative(group: Sequence[Outcome]) -> bool:
    """Whether the rewards of a group differ, so that its advantages are not all zero."""
    return len({outcome.reward for outcome in group}) > 1


def newest_rollout(buffer: ReplayBuffer) -> list[Outcome]:
    """The episodes of the newest policy version in the buffer, without those that failed."""
    outcomes = buffer.outcomes(exclude=FAILURES)
    start = len(outcomes)
    while start and outcomes[start - 1].policy_version == outcomes[-1].policy_version:
        start -= 1
    return outcomes[start:]


class OnPolicySampler:
    """Cuts the newest rollout into shuffled minibatches, once per epoch.

    Args:
        buffer: where from.
        plan: sizes.
        seed: another seed gives another order.
    """

    def __init__(self, buffer: ReplayBuffer, plan: RolloutPlan, seed: int) -> None:
        self.buffer, self.plan, self.seed = buffer, plan, seed
        self._known: tuple[int, int] | None = None
        self._groups: list[Group] = []

    def groups(self) -> list[Group]:
        """The groups that are trained on.

        Raises:
            ConfigError: the buffer is empty.
        """
        index = (self.buffer.high_water_mark, self.buffer.index().truncations)
        if index != self._known:
            groups = make_groups(newest_rollout(self.buffer), self.plan.group_size)
            if not groups:
                raise ConfigError(
                    "trainer.callbacks",
                    "there is no rollout to train on",
                    "add nlac_lightning.callbacks.RolloutCallback",
                )
            if self.plan.informative:
                kept = [group for group in groups if informative(group)]
                groups = (kept or groups)[: self.plan.episodes // self.plan.group_size]
            self._groups, self._known = groups, index
        return self._groups

    def rollout(self) -> list[Key]:
        """All transitions of the rollout."""
        return _keys(self.groups())

    def draw(self, position: int) -> list[Key]:
        """Keys of the batch of gradient step ``position`` (from 0), episode by episode."""
        groups = self.groups()
        epoch, part = divmod(position % self.plan.steps, self.plan.minibatches)
        rollout = position // self.plan.steps
        order = np.random.default_rng([self.seed, rollout, epoch]).permutation(len(groups))
        chosen = np.array_split(order, self.plan.minibatches)[part]
        return _keys(groups[i] for i in chosen)


def _keys(groups: Iterable[Group]) -> list[Key]:
    return [(o.episode_id, t) for group in groups for o in group for t in range(o.turns)]
