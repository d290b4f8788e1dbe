"""Fills the replay buffer with episodes of the current policy."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning
import numpy as np
from tqdm.auto import tqdm

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.callbacks.ahead import Ahead
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import barrier, gather, rank, sums, world_size
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.generation.vllm import VLLMGenerator
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
        ahead: play the later collections while the model trains on. One that begins at a gradient
            step joins the buffer at the next one that is due, so its policy is ``every_n_steps``
            steps old (logged as ``rollout/staleness``); a checkpoint waits for it. Needs an engine
            in another process (``model.compute.generation``); refused for on-policy algorithms.
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
        ahead: bool = False,
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
        self.ahead = ahead
        self._running: Ahead | None = None
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
        if self.ahead:
            self._check_ahead(module)
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

    def _check_ahead(self, module: Algorithm) -> None:
        if self._plan is not None:
            raise ConfigError(
                "rollout.ahead",
                f"{type(module).__name__} learns from the present policy's episodes only",
                "set it to false, or use an off-policy algorithm (nlac, rft)",
            )
        if not isinstance(module.generator, VLLMGenerator) or world_size() > 1:
            raise ConfigError(
                "rollout.ahead",
                "the process that trains cannot generate meanwhile",
                "set model.compute.generation.engine to vllm or vllm_server, trainer.devices to 1",
            )

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
        if not self.episodes or trainer.global_step % self.every_n_steps:
            return
        if not self.ahead:
            self._collect(trainer, pl_module, self.episodes, self.exploration)
            return
        self._join(trainer, pl_module)
        data, module = _parts(trainer, pl_module)
        assert isinstance(module.generator, VLLMGenerator)
        rollout, jobs = self._begin(data, module, self.episodes, self.exploration)
        actor = ModelActor(module.roles, module.generator.pinned())
        self._running = Ahead(rollout, jobs, actor, module.backbone.versions["online"])

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._join(trainer, pl_module)

    def _join(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Commit what was played ahead, once it has ended."""
        if self._running is None:
            return
        running, self._running = self._running, None
        data, module = _parts(trainer, pl_module)
        played = running.wait()
        data.buffer.append_many(played)
        age = module.backbone.versions["online"] - running.version
        self._report(
            trainer, running.rollout, played, running.seconds, {"rollout/staleness": float(age)}
        )

    def _begin(
        self, data: ReplayDataModule, module: Algorithm, count: int, exploration: Exploration
    ) -> tuple[Rollout, list[tuple[Task, int]]]:
        """A rollout and this process's part of the tasks that come next."""
        first = sum(data.marks())
        jobs = [self._job(first + i) for i in range(count)][rank() :: world_size()]
        barrier()  # all know where to begin before any episode is added
        # what several processes find is put together when they are done
        paths = self._paths if world_size() == 1 else dict(self._paths)
        return Rollout(data.env, module.roles, self.limits, exploration, paths), jobs

    def _collect(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        count: int,
        exploration: Exploration,
        show: bool = False,
    ) -> None:
        data, module = _parts(trainer, pl_module)
        rollout, jobs = self._begin(data, module, count, exploration)
        began = time.perf_counter()
        at_once = world_size() == 1 or data.buffer_per_process
        played: list[Episode] = []
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
                    played.append(episode)
                jobs = self._again(data.buffer, collections)
        for process in range(world_size()):  # one after the other, so that ids are the same
            if process == rank() and not at_once:
                data.buffer.append_many(played)
            barrier()
        seconds = time.perf_counter() - began
        scalars = self._report(trainer, rollout, played, seconds)
        if shown:
            log.info(
                "collected %.0f episodes (%.1f turns each, %.0f%% successful) in %.0f s",
                scalars["rollout/episodes"],
                scalars["rollout/turns"],
                100 * scalars["rollout/success"],
                seconds,
            )

    def _report(
        self,
        trainer: lightning.Trainer,
        rollout: Rollout,
        played: Sequence[Episode],
        seconds: float,
        more: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Put together what all processes played, and log it."""
        data, module = _parts(trainer, trainer.lightning_module)
        parts = gather([episode.total_reward for episode in played])
        rewards = [reward for part in parts for reward in part]
        counts: Counter[str] = sum(gather(rollout.counts), Counter())
        self.turns += sum(gather(sum(len(episode.turns) for episode in played)))
        found = {task: way for task, way in rollout.paths.items() if way != self._paths.get(task)}
        for part in gather(found):
            self._paths |= part
        branches = sums(gather(dict(module.counts)))
        turns = max(counts["turns"], 1)
        scalars = {
            "rollout/episodes": float(len(rewards)),
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
            logger.log_metrics(scalars | (more or {}), step=trainer.global_step)
        return scalars

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
        self._join(trainer, pl_module)  # a resumed run then begins where this one goes on
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
