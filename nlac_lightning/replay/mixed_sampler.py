"""Batches of which a part comes from successful episodes."""

from __future__ import annotations

from nlac_lightning.replay.buffer import Key, ReplayBuffer
from nlac_lightning.replay.sampler import BatchSampler
from nlac_lightning.replay.successes import SuccessSampler

PER_TASK = 4
"""Newest successes of a task that are drawn from: old ones took longer ways."""


class MixedSampler:
    """A share of each batch from successful episodes, the rest as another sampler draws it.

    Where success is rare, hardly any batch holds a transition that earned a reward, and a critic
    that bootstraps has nothing to start from. A transition that both parts draw stands twice.

    Args:
        buffer: where from.
        rest: draws the other part; its batches are as large as the whole batch.
        batch_size: transitions per batch.
        share: of the batch that comes from successful episodes, in (0, 1]. While there are too few
            of them the rest fills the batch.
        after: so many first batches have no such share. A critic that learns from outcomes needs
            them as often as they are.
        seed: another seed gives another sequence of batches.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        rest: BatchSampler,
        batch_size: int,
        share: float,
        after: int = 0,
        seed: int = 0,
    ) -> None:
        self.buffer, self.rest, self.batch_size, self.after = buffer, rest, batch_size, after
        size = max(1, round(share * batch_size))
        self.successes = SuccessSampler(buffer, size, per_task=PER_TASK, seed=seed)

    def draw(self, position: int) -> list[Key]:
        """Keys of batch number ``position`` (0, 1, ...), the successful ones first."""
        good = self.successes.draw(position) if position >= self.after else []
        return good + self.rest.draw(position)[: self.batch_size - len(good)]
