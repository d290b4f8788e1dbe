"""Which transitions make a batch: a pure function of seed, position and what the buffer holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import numpy as np

from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.replay.buffer import Key, ReplayBuffer

Strategy = Literal["uniform", "recency"]

# Rounds of looking for transitions that the batch does not hold yet, before repeats are accepted.
# One is enough for large buffers; under steep recency few transitions have any weight at all.
ROUNDS = 8


class BatchSampler(Protocol):
    """Which transitions make a batch: a pure function of its number and what the buffer holds."""

    buffer: ReplayBuffer

    def draw(self, position: int) -> list[Key]:
        """Keys of batch number ``position`` (0, 1, ...)."""
        ...


def check_sampling(
    batch_size: int,
    strategy: str,
    recency_half_life: float,
    transitions_per_episode: int,
    contrast_batches: int,
    seed: int,
) -> None:
    """Raise ConfigError for settings that :class:`TransitionSampler` does not take."""
    require_positive("data.batch_size", batch_size)
    require_choice("data.strategy", strategy, get_args(Strategy))
    require_positive("data.recency_half_life", recency_half_life)
    require_positive("data.transitions_per_episode", transitions_per_episode)
    require_positive("data.contrast_batches", contrast_batches, zero=True)
    require_positive("data.seed", seed, zero=True)


class TransitionSampler:
    """Draws batches of transition keys.

    A batch holds each transition once if the buffer is large enough, else it is filled up with
    repeats. The cost of a draw grows with the batch and with one number per episode.

    Args:
        buffer: where from.
        batch_size: transitions per batch.
        strategy: ``uniform`` gives all transitions the same chance; ``recency`` halves it with
            every ``recency_half_life`` episodes of age. Fresh data is nearer to the policy's own
            distribution, old data guards against forgetting.
        recency_half_life: in episodes; used by ``recency`` only. Typical: a quarter of the
            buffer's episodes.
        transitions_per_episode: how many turns of one episode to take together. They share their
            prefix, so more of them train faster, but are less independent.
        contrast_batches: in so many first batches, follow each transition by another action that
            was taken in the very same state and had another best return, where there is one. Such
            pairs share all but their last tokens, and teach a critic in its warm-up what matters;
            exploration that returns to known states, or several episodes of a task, make them.
        seed: another seed gives another sequence of batches.
        exclude: episodes that ended for one of these reasons are never drawn.

    Raises:
        ConfigError: an unknown strategy or a size that is not positive.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int,
        strategy: Strategy = "uniform",
        recency_half_life: float = 1000.0,
        transitions_per_episode: int = 1,
        contrast_batches: int = 0,
        seed: int = 0,
        exclude: Sequence[str] = (),
    ) -> None:
        check_sampling(
            batch_size, strategy, recency_half_life, transitions_per_episode, contrast_batches, seed
        )
        self.buffer = buffer
        self.batch_size = batch_size
        self.half_life = recency_half_life if strategy == "recency" else math.inf
        self.per_episode = transitions_per_episode
        self.contrast_batches = contrast_batches
        self.seed = seed
        self.exclude = tuple(exclude)
        self._index = buffer.index(exclude=self.exclude)
        self._cumulative = self._weights().cumsum()

    def draw(self, position: int) -> list[Key]:
        """Keys of batch number ``position`` (0, 1, ...); those of an episode stand together, by t.

        Raises:
            ConfigError: the buffer is empty.
        """
        self._refresh()
        if not len(self._index.ids):
            raise ConfigError(
                str(self.buffer.path),
                "holds no transition to draw from",
                "collect episodes before training (RolloutCallback) or `nlac replay import` some",
            )
        rng = np.random.default_rng([self.seed, position])
        distinct: dict[Key, None] = {}
        drawn: list[Key] = []
        for _ in range(ROUNDS):
            drawn = self._candidates(rng, contrast=position < self.contrast_batches)
            distinct.update(dict.fromkeys(drawn))
            if len(distinct) >= self.batch_size:
                break
        keys = list(distinct)[: self.batch_size]
        while len(keys) < self.batch_size:
            keys += drawn[: self.batch_size - len(keys)]
        rank: dict[int, int] = {}
        for episode_id, _ in keys:
            rank.setdefault(episode_id, len(rank))
        return sorted(keys, key=lambda key: (rank[key[0]], key[1]))

    def _candidates(self, rng: np.random.Generator, contrast: bool = False) -> list[Key]:
        """At least one key per place in the batch where possible, drawn with replacement."""
        groups = math.ceil(self.batch_size / self.per_episode / (1 + contrast))
        points = rng.random(groups) * self._cumulative[-1]
        rows = np.searchsorted(self._cumulative, points, side="right")
        rows = np.minimum(rows, len(self._cumulative) - 1)  # the product may round up to the end
        keys: list[Key] = []
        for row in rows:
            episode_id, turns = int(self._index.ids[row]), int(self._index.turns[row])
            chosen = rng.choice(turns, size=min(self.per_episode, turns), replace=False)
            for t in chosen:
                keys.append((episode_id, int(t)))
                if contrast:
                    keys += self._contrast(keys[-1], rng)
        return keys

    def _contrast(self, key: Key, rng: np.random.Generator) -> list[Key]:
        """One other action of the same state with another best return, if there is any."""
        found = dict(self.buffer.alternatives(key))
        best = self.buffer.transition(*key).best_return
        others = [other for other, value in found.items() if value != best]
        return [others[int(rng.integers(len(others)))]] if others else []

    def _weights(self) -> np.ndarray:
        """Weight of each episode, such that all its transitions get the chance they should.

        A group holds min(per_episode, turns) of an episode's turns, so max(per_episode, turns) in
        the weight gives every transition the same chance, in short episodes too.
        """
        ids, turns = self._index.ids, self._index.turns
        weights: np.ndarray = np.maximum(turns, self.per_episode).astype(np.float64)
        if len(ids):
            weights *= 0.5 ** ((ids[-1] - ids) / self.half_life)
        return weights

    def _refresh(self) -> None:
        """Follow the buffer by reading only what was appended since the last draw."""
        old = self._index
        new = self.buffer.index(int(old.ids[-1]) if len(old.ids) else 0, self.exclude)
        if new.truncations != old.truncations:
            self._index = self.buffer.index(exclude=self.exclude)
        elif len(new.ids) or new.oldest != old.oldest:
            keep = old.ids >= new.oldest
            self._index = new._replace(
                ids=np.concatenate([old.ids[keep], new.ids]),
                turns=np.concatenate([old.turns[keep], new.turns]),
            )
        else:
            return
        self._cumulative = self._weights().cumsum()
