"""Batches from successful episodes alone."""

from __future__ import annotations

from collections import Counter

import numpy as np

from nlac_lightning.replay.buffer import Key, ReplayBuffer


class SuccessSampler:
    """Draws whole successful episodes, the last one cut to fit; no transition twice in a batch.

    Args:
        buffer: where from.
        batch_size: transitions per batch; fewer come where fewer are held, none without success.
        min_reward: an episode is successful if its total reward is above.
        per_task: newest successes of a task that are drawn from; None takes all.
        seed: another seed gives another sequence of batches.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int,
        min_reward: float = 0.0,
        per_task: int | None = None,
        seed: int = 0,
    ) -> None:
        self.buffer, self.batch_size, self.seed = buffer, batch_size, seed
        self.min_reward, self.per_task = min_reward, per_task
        self._known: tuple[int, int] | None = None
        self._successes: list[tuple[int, int]] = []

    def successes(self) -> list[tuple[int, int]]:
        """Id and number of turns of each episode that is drawn from, newest first."""
        state = (self.buffer.high_water_mark, self.buffer.index().truncations)
        if state != self._known:
            taken: Counter[str] = Counter()
            self._successes = []
            for outcome in reversed(self.buffer.outcomes()):
                full = self.per_task is not None and taken[outcome.task_id] >= self.per_task
                if outcome.reward > self.min_reward and not full:
                    taken[outcome.task_id] += 1
                    self._successes.append((outcome.episode_id, outcome.turns))
            self._known = state
        return self._successes

    def draw(self, position: int) -> list[Key]:
        """Keys of batch number ``position`` (0, 1, ...); those of an episode stand together."""
        successes = self.successes()
        rng = np.random.default_rng([self.seed, position])
        keys: list[Key] = []
        for place in rng.permutation(len(successes)):
            episode_id, turns = successes[place]
            room = min(turns, self.batch_size - len(keys))
            chosen = np.sort(rng.choice(turns, size=room, replace=False))
            keys += [(episode_id, int(t)) for t in chosen]
            if len(keys) == self.batch_size:
                break
        return keys
