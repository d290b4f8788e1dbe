"""Rollouts that run while the model trains on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nlac_lightning.envs.base import Task
from nlac_lightning.replay.episode import Episode
from nlac_lightning.rollout import ModelActor, Rollout


class Ahead:
    """A rollout in a thread of its own.

    Args:
        rollout, jobs, actor: what is played; the actor's engine must not be the model that trains.
        version: of the adapter that acts.

    Attributes:
        seconds: how long it took, once it has ended.
    """

    def __init__(
        self, rollout: Rollout, jobs: Sequence[tuple[Task, int]], actor: ModelActor, version: int
    ) -> None:
        self.rollout, self.version, self.seconds = rollout, version, 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._played = self._pool.submit(self._play, jobs, actor)

    def _play(self, jobs: Sequence[tuple[Task, int]], actor: ModelActor) -> list[Episode]:
        began = time.perf_counter()
        played = list(self.rollout.play(jobs, actor))
        self.seconds = time.perf_counter() - began
        return played

    def wait(self) -> list[Episode]:
        """The episodes, once all have ended."""
        played = self._played.result()
        self._pool.shutdown()
        return played
