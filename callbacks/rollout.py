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
from nlac_lightning.distributed import barrier, gather, rank, sums, world_size
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.sampler import informative, make_groups, newest_rollout
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode
from nlac_lightning.rollout import Exploration, ModelActor, Rollout, RolloutLimits

log = logging.getLogger(__name__)


class RolloutCallback(lightning.Callback):
    """Plays training tasks before training and every few gradient steps.

    Episodes are committed to the buffer as they end. Which tasks are played, and every draw in
    them, follows from ``seed`` and the number of episodes that the buffer has ever held, so a
    resumed run plays the same ones.

    With several processes each plays its part of the tasks. Into a shared buffer the episodes are
    committed at the end, in the order of the processes, so that it does not depend on their speed;
    with ``data.buffer_per_process`` each keeps its own.

    Args:
        initial_episodes: episodes that the buffer must have held before the first gradient step.
        episodes: episodes of each later collection; 0 trains on what is in the buffer (offline).
        every_n_steps: gradient steps between collections.
        initial_exploration: exploration of the initial episodes.
        exploration: exploration of the later ones.
        initial_tasks: number of training tasks that the initial episodes go over again and again;
            None takes all. ``return`` exploration has to meet a task often to find its way.
        curriculum: number of later episodes over which the tasks grow, in the environment's order,
            from ``initial_tasks`` to all; for environments that order tasks by difficulty. None
            plays all at once.
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
        curriculum: int | None = None,
        limits: RolloutLimits | None = None,
        seed: int = 0,
        fresh: bool = True,
    ) -> None:
        require_positive("rollout.initial_episodes", initial_episodes, zero=True)
        require_positive("rollout.episodes", episodes, zero=True)
        require_positive("rollout.every_n_steps", every_n_steps)
        if initial_tasks is not None:
            require_positive("rollout.initial_tasks", initial_tasks)
        if curriculum is not None:
            require_positive("rollout.curriculum", curriculum)
            if initial_tasks is None:
                raise ConfigError(
                    "rollout.curriculum", "it has no start", "set rollout.initial_tasks"
                )
        self.curriculum = curriculum
        self.initial_episodes, self.episodes = initial_episodes, episodes
        self.initial_tasks = initial_tasks
        self.every_n_steps, self.seed, self.fresh = every_n_steps, seed, fresh
        self.initial_exploration = initial_exploration or Exploration()
        self.exploration = exploration or Exploration()
        self.limits = limits or RolloutLimits()
        self._plan: RolloutPlan | None = None
        self._mark: list[int] | None = None
        self._tasks: list[Task] = []
        self._paths: dict[str, tuple[str, ...]] = {}
        self.turns = 0

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Bind the buffer to this model's ids and bring it to the state of the checkpoint."""
        data, module = _parts(trainer, pl_module)
        self._plan = module.rollout_plan
        if self._plan is not None:
            self._follow(self._plan)
        buffer = data.open_buffer(codec=module.roles.codec.fingerprint)
        if not data.prepares_buffer:
            pass
        elif self._mark is not None:
            buffer.truncate(data.own_mark(self._mark))
        elif self.fresh and self.episodes and buffer.high_water_mark:
            log.info("a new run: %d old episodes leave %s", buffer.num_episodes, buffer.path)
            buffer.truncate(0)
        barrier()
        self._tasks = list(data.env.tasks("train"))
        if not self._tasks and (self.episodes or self.initial_episodes):
            raise ConfigError("data.env", "it has no training tasks", "choose another environment")

    def _follow(self, plan: RolloutPlan) -> None:
        """An on-policy algorithm says what it needs; the limits of an episode stay."""
        self.initial_episodes, self.initial_tasks = plan.episodes, None
        self.episodes, self.every_n_steps = plan.episodes, plan.steps
        self.initial_exploration = self.exploration = Exploration()
        log.info(
            "on-policy: %d episodes of the current policy, without exploration, every %d gradient "
            "steps; RolloutCallback's own numbers and data.batch_size do not apply",
            plan.episodes,
            plan.steps,
        )

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        data, _ = _parts(trainer, pl_module)
        missing = self.initial_episodes - sum(data.marks())
        if self._plan is not None and self._mark is None:  # what a kept file holds is not ours
            missing = self._plan.episodes
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
        first = sum(data.marks())
        jobs = [self._job(first + i) for i in range(count)][rank() :: world_size()]
        barrier()  # all know where to begin before any episode is added
        rollout = Rollout(data.env, module.roles, self.limits, exploration, dict(self._paths))
        began = time.perf_counter()
        rewards, own_turns = [], 0
        at_once = world_size() == 1 or data.buffer_per_process
        waiting: list[Episode] = []
        shown = show and trainer.is_global_zero
        bar = tqdm(total=len(jobs), desc="rollouts", disable=not shown, leave=False)
        with bar, module.backbone.whole():
            collections = 0
            while jobs:
                collections += 1
                for episode in rollout.play(
                    jobs, ModelActor(module.roles, module.generator), bar.update
                ):
                    if at_once:
                        data.buffer.append(episode)
                    else:
                        waiting.append(episode)
                    rewards.append(episode.total_reward)
                    own_turns += len(episode.turns)
                jobs = self._again(data.buffer, collections)
        for process in range(world_size()):  # one after the other, so that ids are the same
            if process == rank() and waiting:
                data.buffer.append_many(waiting)
            barrier()
        rewards = [reward for part in gather(rewards) for reward in part]
        counts: Counter[str] = sum(gather(rollout.counts), Counter())
        self.turns += sum(gather(own_turns))
        found = {task: way for task, way in rollout.paths.items() if way != self._paths.get(task)}
        for part in gather(found):
            self._paths |= part
        branches = sums(gather(dict(module.counts)))
        seconds = time.perf_counter() - began
        turns = max(counts["turns"], 1)
        scalars = {
            "rollout/success": float(np.mean([r > 0 for r in rewards])) if rewards else 0.0,
            "rollout/turns": turns / max(len(rewards), 1),
            "rollout/invalid": counts["invalid"] / turns,
            "rollout/explored": counts["explored"] / turns,
            "rollout/seconds": seconds,
            # what the algorithm itself plays while it trains is paid for as well
            "env/episodes": sum(data.marks()) + branches.get("branch_episodes", 0.0),
            "env/turns": self.turns + branches.get("branch_turns", 0.0),
        }
        for name in (
            "reset_error",
            "cut_off",
            "end/env_error",
            "end/token_limit",
            "end/time_limit",
        ):
            if counts[name]:
                scalars[f"rollout/{name.removeprefix('end/')}"] = float(counts[name])
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

    def _again(self, buffer: ReplayBuffer, collections: int) -> list[tuple[Task, int]]:
        """Further tasks to play with the same policy, until enough groups tell actions apart."""
        plan = self._plan
        if plan is None or not plan.informative or collections >= plan.max_collections:
            return []
        groups = make_groups(newest_rollout(buffer), plan.group_size)
        told = plan.group_size * sum(informative(group) for group in groups)
        first = buffer.high_water_mark
        return [self._job(first + i) for i in range(plan.episodes if told < plan.episodes else 0)]

    def _job(self, number: int) -> tuple[Task, int]:
        """Task and seed of the buffer's episode ``number``: every pass is shuffled anew."""
        tasks = self._tasks
        if number < self.initial_episodes:
            tasks = tasks[: self.initial_tasks]
        elif self.curriculum and self.initial_tasks:
            share = min((number - self.initial_episodes) / self.curriculum, 1.0)
            grown = self.initial_tasks + share * (len(tasks) - self.initial_tasks)
            tasks = tasks[: int(grown)]
        group = number // (self._plan.group_size if self._plan else 1)
        turn, place = divmod(group, len(tasks))
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
        checkpoint["replay_high_water_mark"] = _parts(trainer, pl_module)[0].marks()

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
