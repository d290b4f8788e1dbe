"""Fills the replay buffer with episodes of the current policy."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import lightning
import numpy as np
from tqdm.auto import tqdm

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.failures import FailureWatch
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.sampler import informative, make_groups, newest_rollout
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.codec import clean
from nlac_lightning.rollout import Exploration, ModelActor, Rollout, RolloutLimits

log = logging.getLogger(__name__)


class RolloutCallback(lightning.Callback):
    """Plays training tasks before training and every few gradient steps.

    Episodes are committed to the buffer as they end. Which tasks are played, and every draw in
    them, follows from ``seed`` and the number of episodes that the buffer has ever held, so a
    resumed run plays the same ones.

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
        max_failures: share of the newest 32 episodes, in (0, 1], that may fail (environment, user
            or engine raise, hang or drop); more stop the run with the reason.
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
        max_failures: float = 0.5,
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
        require_positive("rollout.max_failures", max_failures)
        require_positive("rollout.max_failures", 1 - max_failures, zero=True)
        self._watch = FailureWatch(max_failures)
        self.curriculum = curriculum
        self.initial_episodes, self.episodes = initial_episodes, episodes
        self.initial_tasks = initial_tasks
        self.every_n_steps, self.seed, self.fresh = every_n_steps, seed, fresh
        self.initial_exploration = initial_exploration or Exploration()
        self.exploration = exploration or Exploration()
        self.limits = limits or RolloutLimits()
        self._plan: RolloutPlan | None = None
        self._mark: int | None = None
        self._resumed = False
        self._tasks: list[Task] = []
        self._paths: dict[str, tuple[str, ...]] = {}
        self.turns = 0
        self._done: int | None = None
        self._unfinished: dict[str, Any] | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Bind the buffer to this model's ids and bring it to the state of the checkpoint."""
        data, module = _parts(trainer, pl_module)
        self._unfinished = None
        self._plan = module.rollout_plan
        if self._plan is not None:
            self._follow(self._plan)
        buffer = data.open_buffer(codec=module.roles.codec.fingerprint)
        if self._mark is not None:
            buffer.truncate(self._mark)
        elif self.fresh and not self._resumed and self.episodes and buffer.high_water_mark:
            log.info("a new run: %d old episodes leave %s", buffer.num_episodes, buffer.path)
            buffer.truncate(0)
        self._tasks = list(data.env.tasks("train"))
        if not self._tasks and (self.episodes or self.initial_episodes):
            raise ConfigError("data.env", "it has no training tasks", "choose another environment")
        for task in self._tasks:
            if clean(task.id) != task.id:
                raise ConfigError("data.env", f"task id {task.id!a} is no text", "give it another")

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
        missing = self.initial_episodes - data.buffer.high_water_mark
        if self._plan is not None and not self._resumed:  # what a kept file holds is not ours
            missing = self._plan.episodes
        if missing > 0:
            played = set(data.buffer.seeds())  # those of a run that was killed meanwhile
            fresh = (n for n in itertools.count() if self._seed(n) not in played)
            numbers = list(itertools.islice(fresh, missing))
            self._collect(trainer, pl_module, numbers, self.initial_exploration, show=True)
        if self._done is not None and self._done < trainer.global_step:
            self._after_step(trainer, pl_module)  # a step that was stopped before its end
        self._done = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._after_step(trainer, pl_module)

    def _after_step(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.episodes and trainer.global_step % self.every_n_steps == 0:
            mark = _parts(trainer, pl_module)[0].buffer.high_water_mark
            self._unfinished = {"mark": mark, "state": self.state_dict()}
            first = range(mark, mark + self.episodes)
            self._collect(trainer, pl_module, first, self.exploration)
            self._unfinished = None
        self._done = trainer.global_step

    def _collect(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        numbers: Sequence[int],
        exploration: Exploration,
        show: bool = False,
    ) -> None:
        data, module = _parts(trainer, pl_module)
        jobs = [self._job(number) for number in numbers]
        rollout = Rollout(data.env, module.roles, self.limits, exploration, self._paths)
        began = time.perf_counter()
        rewards = []
        with tqdm(total=len(jobs), desc="rollouts", disable=not show, leave=False) as bar:
            collections = 0
            while jobs:
                collections += 1
                for episode in rollout.play(
                    jobs, ModelActor(module.roles, module.generator), bar.update
                ):
                    data.buffer.append(episode)
                    rewards.append(episode.total_reward)
                    self.turns += len(episode.turns)
                    self._watch.see(episode)
                jobs = self._again(data.buffer, collections)
        seconds = time.perf_counter() - began
        turns = max(rollout.counts["turns"], 1)
        scalars = {
            "rollout/success": float(np.mean([r > 0 for r in rewards])) if rewards else 0.0,
            "rollout/turns": turns / max(len(rewards), 1),
            "rollout/invalid": rollout.counts["invalid"] / turns,
            "rollout/explored": rollout.counts["explored"] / turns,
            "rollout/seconds": seconds,
            # what the algorithm itself plays while it trains is paid for as well
            "env/episodes": float(data.buffer.high_water_mark + module.counts["branch_episodes"]),
            "env/turns": float(self.turns + module.counts["branch_turns"]),
        }
        for name in (
            "reset_error",
            "cut_off",
            "end/env_error",
            "end/user_failed",
            "end/policy_failed",
            "end/token_limit",
            "end/time_limit",
        ):
            if rollout.counts[name]:
                scalars[f"rollout/{name.removeprefix('end/')}"] = float(rollout.counts[name])
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)
        if show:
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
        return tasks[order[place]], self._seed(number)

    def _seed(self, number: int) -> int:
        return self.seed * 1_000_003 + number

    def state_dict(self) -> dict[str, Any]:
        """Of the last whole collection: one that is stopped is played again from its start."""
        if self._unfinished is not None:
            return dict(self._unfinished["state"])
        paths = {k: list(v) for k, v in self._paths.items()}
        return {"turns": self.turns, "paths": paths, "step": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turns, self._done = state_dict["turns"], state_dict.get("step")
        self._paths = {task: tuple(way) for task, way in state_dict["paths"].items()}

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        mark = None  # before and in the first collection: a continued run keeps what is there
        if self._unfinished is not None:
            mark = self._unfinished["mark"]
        elif self._done is not None:
            mark = _parts(trainer, pl_module)[0].buffer.high_water_mark
        checkpoint["replay_high_water_mark"] = mark

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        self._resumed = True
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
