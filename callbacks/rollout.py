"""Fills the replay buffer with episodes of the current policy."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import lightning
import numpy as np
from tqdm.auto import tqdm

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import barrier, gather, rank, world_size
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.rollout import Exploration, ModelActor, Rollout, RolloutLimits

log = logging.getLogger(__name__)


class RolloutCallback(lightning.Callback):
    """Plays training tasks before training and every few gradient steps.

    Episodes are committed to the buffer as they end. Which tasks are played, and every draw in
    them, follows from ``seed`` and the number of episodes that the buffer has ever held, so a
    resumed run plays the same ones.

    With several processes the buffer is shared (a file on one machine): each plays its part of the
    tasks, and the episodes are committed in the order of the processes.

    Args:
        initial_episodes: episodes that the buffer must have held before the first gradient step.
        episodes: episodes of each later collection; 0 trains on what is in the buffer (offline).
        every_n_steps: gradient steps between collections.
        initial_exploration: exploration of the initial episodes.
        exploration: exploration of the later ones.
        initial_tasks: number of training tasks that the initial episodes go over again and again;
            None takes all. ``return`` exploration has to meet a task often to find its way.
        limits: bounds of an episode.
        seed: seed of tasks and draws.
        fresh: empty the buffer at the start of a run that does not resume a checkpoint.
    """

    def __init__(
        self,
        initial_episodes: int = 64,
        episodes: int = 16,
        every_n_steps: int = 1,
        initial_exploration: Exploration | None = None,
        exploration: Exploration | None = None,
        initial_tasks: int | None = None,
        limits: RolloutLimits | None = None,
        seed: int = 0,
        fresh: bool = True,
    ) -> None:
        require_positive("rollout.initial_episodes", initial_episodes, zero=True)
        require_positive("rollout.episodes", episodes, zero=True)
        require_positive("rollout.every_n_steps", every_n_steps)
        if initial_tasks is not None:
            require_positive("rollout.initial_tasks", initial_tasks)
        self.initial_episodes, self.episodes = initial_episodes, episodes
        self.initial_tasks = initial_tasks
        self.every_n_steps, self.seed, self.fresh = every_n_steps, seed, fresh
        self.initial_exploration = initial_exploration or Exploration()
        self.exploration = exploration or Exploration()
        self.limits = limits or RolloutLimits()
        self._mark: int | None = None
        self._tasks: list[Task] = []
        self._paths: dict[str, tuple[str, ...]] = {}
        self.turns = 0

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Bind the buffer to this model's ids and bring it to the state of the checkpoint."""
        data, module = _parts(trainer, pl_module)
        buffer = data.open_buffer(codec=module.roles.codec.fingerprint)
        if not trainer.is_global_zero:
            pass  # the buffer is shared, and process 0 prepares it
        elif self._mark is not None:
            buffer.truncate(self._mark)
        elif self.fresh and self.episodes and buffer.high_water_mark:
            log.info("a new run: %d old episodes leave %s", buffer.num_episodes, buffer.path)
            buffer.truncate(0)
        barrier()
        self._tasks = list(data.env.tasks("train"))
        if not self._tasks and (self.episodes or self.initial_episodes):
            raise ConfigError("data.env", "it has no training tasks", "choose another environment")

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        data, _ = _parts(trainer, pl_module)
        missing = self.initial_episodes - data.buffer.high_water_mark
        if missing > 0:
            self._collect(trainer, pl_module, missing, self.initial_exploration, show=True)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self.episodes and trainer.global_step % self.every_n_steps == 0:
            self._collect(trainer, pl_module, self.episodes, self.exploration)

    def _collect(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        count: int,
        exploration: Exploration,
        show: bool = False,
    ) -> None:
        data, module = _parts(trainer, pl_module)
        first = data.buffer.high_water_mark
        jobs = [self._job(first + i) for i in range(count)][rank() :: world_size()]
        barrier()  # all know where to begin before any episode is added
        rollout = Rollout(data.env, module.roles, self.limits, exploration, self._paths)
        began = time.perf_counter()
        rewards = []
        waiting = []
        shown = show and trainer.is_global_zero
        bar = tqdm(total=len(jobs), desc="rollouts", disable=not shown, leave=False)
        with bar, module.backbone.whole():
            for episode in rollout.play(
                jobs, ModelActor(module.roles, module.generator), bar.update
            ):
                if world_size() == 1:
                    data.buffer.append(episode)
                else:
                    waiting.append(episode)
                rewards.append(episode.total_reward)
        for turn in range(world_size()):  # one process after the other, so that ids are the same
            if turn == rank() and waiting:
                data.buffer.append_many(waiting)
            barrier()
        rewards = [reward for part in gather(rewards) for reward in part]
        rollout.counts = sum(gather(rollout.counts), Counter())
        self.turns += rollout.counts["turns"]
        seconds = time.perf_counter() - began
        turns = max(rollout.counts["turns"], 1)
        scalars = {
            "rollout/success": float(np.mean([r > 0 for r in rewards])) if rewards else 0.0,
            "rollout/turns": turns / max(len(rewards), 1),
            "rollout/invalid": rollout.counts["invalid"] / turns,
            "rollout/explored": rollout.counts["explored"] / turns,
            "rollout/seconds": seconds,
            "env/episodes": float(data.buffer.high_water_mark),
            "env/turns": float(self.turns),
        }
        for name in (
            "reset_error",
            "cut_off",
            "end/env_error",
            "end/token_limit",
            "end/time_limit",
        ):
            if rollout.counts[name]:
                scalars[f"rollout/{name.removeprefix('end/')}"] = float(rollout.counts[name])
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        if shown:
            log.info(
                "collected %d episodes (%d turns, %.0f%% successful) in %.0f s",
                len(rewards),
                turns,
                100 * scalars["rollout/success"],
                seconds,
            )

    def _job(self, number: int) -> tuple[Task, int]:
        """Task and seed of the buffer's episode ``number``: every pass is shuffled anew."""
        tasks = self._tasks
        if number < self.initial_episodes:
            tasks = tasks[: self.initial_tasks]
        turn, place = divmod(number, len(tasks))
        order = np.random.default_rng([self.seed, turn]).permutation(len(tasks))
        return tasks[order[place]], self.seed * 1_000_003 + number

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns, "paths": {k: list(v) for k, v in self._paths.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turns = state_dict["turns"]
        self._paths = {task: tuple(way) for task, way in state_dict["paths"].items()}

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        checkpoint["replay_high_water_mark"] = _parts(trainer, pl_module)[0].buffer.high_water_mark

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        self._mark = checkpoint.get("replay_high_water_mark")


def _parts(
    trainer: lightning.Trainer, module: lightning.LightningModule
) -> tuple[ReplayDataModule, Algorithm]:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, ReplayDataModule) or not isinstance(module, Algorithm):
        raise ConfigError(
            "trainer.callbacks",
            "RolloutCallback needs a ReplayDataModule and an Algorithm",
            "use them, or remove the callback",
        )
    return data, module
