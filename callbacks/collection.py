"""One collection of episodes: what each process plays of it, and what all of them played."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import agree, gather, rank, world_size
from nlac_lightning.envs.base import Task
from nlac_lightning.failures import FailureWatch
from nlac_lightning.replay.connection import BufferWriteError
from nlac_lightning.replay.episode import Episode
from nlac_lightning.rollout import Rollout

Jobs = Sequence[tuple[Task, int]]
"""Tasks to play, each with its seed."""

FAULTS = (
    "reset_error",
    "cut_off",
    "end/env_error",
    "end/user_failed",
    "end/policy_failed",
    "end/token_limit",
    "end/time_limit",
)
"""Counts of a rollout that are logged where there are any."""


@dataclass
class Played:
    """What one process played.

    Attributes:
        rollout: who played, with its counts and the paths that it found.
        episodes: in the order in which they ended.
        seconds: how long it took.
    """

    rollout: Rollout
    episodes: Sequence[Episode]
    seconds: float


@dataclass
class Totals:
    """What all processes played.

    Attributes:
        rewards: total reward of each episode.
        counts: see :class:`~nlac_lightning.rollout.Rollout`.
        turns: of all episodes.
        paths: found for each task, see :class:`~nlac_lightning.rollout.Rollout`.
    """

    rewards: list[float]
    counts: Counter[str]
    turns: int
    paths: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, played: Played, known: dict[str, tuple[str, ...]]) -> Totals:
        """Put together what each process played; all call it, with the paths ``known`` before."""
        parts = gather([(e.total_reward, len(e.turns)) for e in played.episodes])
        episodes = [episode for part in parts for episode in part]
        found = {t: way for t, way in played.rollout.paths.items() if way != known.get(t)}
        return cls(
            rewards=[reward for reward, _ in episodes],
            counts=sum(gather(played.rollout.counts), Counter()),
            turns=sum(turns for _, turns in episodes),
            paths={t: way for part in gather(found) for t, way in part.items()},
        )

    def scalars(self) -> dict[str, float]:
        """What to log under ``rollout/``."""
        turns = max(self.counts["turns"], 1)
        success = float(np.mean([r > 0 for r in self.rewards])) if self.rewards else 0.0
        return {
            "rollout/episodes": float(len(self.rewards)),
            "rollout/success": success,
            "rollout/turns": turns / max(len(self.rewards), 1),
            "rollout/invalid": self.counts["invalid"] / turns,
            "rollout/explored": self.counts["explored"] / turns,
        } | {
            f"rollout/{name.removeprefix('end/')}": float(self.counts[name])
            for name in FAULTS
            if self.counts[name]
        }


def collect(
    data: ReplayDataModule,
    module: Algorithm,
    rollout: Rollout,
    jobs: Jobs,
    again: Callable[[int], Jobs],
    watch: FailureWatch,
    show: bool = False,
) -> Played:
    """Play this process's ``jobs`` and commit the episodes to the buffer.

    A process that is alone, or has a buffer of its own, commits each episode as it ends. Into a
    shared buffer the processes commit at the end, one after the other, so that the episodes' order
    does not depend on their speed.

    Args:
        again: further jobs, after so many rounds.
        watch: sees each episode.
        show: show a progress bar.

    Raises:
        TooManyFailures: too many of the newest episodes failed.
        BufferWriteError: an episode could not be stored.
        StoppedRun: another process has failed.
    """
    began = time.perf_counter()
    at_once = world_size() == 1 or data.buffer_per_process
    actor = ModelActor(module.roles, module.generator)
    episodes: list[Episode] = []
    failure: Exception | None = None
    bar = tqdm(total=len(jobs), desc="rollouts", disable=not show, leave=False)
    with bar, module.backbone.whole():
        try:
            for rounds in itertools.count(1):
                for episode in rollout.play(jobs, actor, bar.update):
                    if at_once:
                        data.buffer.append(episode)
                    episodes.append(episode)
                    watch.see(episode)
                jobs = again(rounds)
                if not jobs:
                    break
        except Exception as error:
            failure = error
    agree(failure)
    for process in range(world_size()):
        try:
            if process == rank() and not at_once:
                data.buffer.append_many(episodes)
        except BufferWriteError as error:
            failure = error
        agree(failure)
    return Played(rollout, episodes, time.perf_counter() - began)
