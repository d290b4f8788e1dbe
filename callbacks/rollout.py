"""Fills the replay buffer with episodes of the current policy."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import lightning
import numpy as np

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.callbacks.ahead import Ahead, check_ahead
from nlac_lightning.callbacks.collection import Jobs, Played, Totals, collect
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import barrier, gather, rank, sums, world_size
from nlac_lightning.envs.base import Task
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.failures import FailureWatch, TooManyFailures
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.interrupts import whole
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.sampler import informative, make_groups, newest_rollout
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.codec import clean
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits, remember_path

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
        every_n_steps: gradient steps between collections; none follows the last step.
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
        ahead: play the later collections while the model trains on. One that begins at a gradient
            step joins the buffer at the next one that is due, so its policy is ``every_n_steps``
            steps old (logged as ``rollout/staleness``); a checkpoint waits for it. A run that is
            stopped does not: it plays the same seeds again when it continues, with the policy of
            then. Needs an engine in another process (``model.compute.generation``); refused for
            on-policy algorithms.
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
        self.ahead = ahead
        self._running: Ahead | None = None
        self._owed = False  # a collection that was dropped
        self._failure: TooManyFailures | None = None
        self._plan: RolloutPlan | None = None
        self._marks: list[int] | None = None
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
        if self.ahead:
            check_ahead(module)
        buffer = data.open_buffer(codec=module.roles.codec.fingerprint)
        if not data.prepares_buffer:
            pass
        elif self._marks is not None:
            buffer.truncate(data.own_mark(self._marks))
        elif self.fresh and not self._resumed and self.episodes and buffer.high_water_mark:
            log.info("a new run: %d old episodes leave %s", buffer.num_episodes, buffer.path)
            buffer.truncate(0)
        barrier()
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
        missing = self.initial_episodes - sum(data.marks())
        if self._plan is not None and not self._resumed:  # what a kept file holds is not ours
            missing = self._plan.episodes
        stopped_in_them = self._resumed and self._marks is None
        if stopped_in_them:  # their episodes are kept, and what they found
            self.turns = sum(data.turns())
            if self.initial_exploration.kind == "return":
                self._paths = {}  # a way that is followed twice may be cut twice
                for episode in data.buffer.iter_episodes():
                    remember_path(self._paths, episode.task_id, episode.turns)
        if missing > 0 or (stopped_in_them and self._plan is not None):
            # those of a run that was killed meanwhile
            played = {seed for part in gather(data.buffer.seeds()) for seed in part}
            fresh = (n for n in itertools.count() if self._seed(n) not in played)
            numbers = list(itertools.islice(fresh, max(missing, 0)))
            self._collect(trainer, pl_module, numbers, self.initial_exploration, show=True)
        if self._owed:
            self._play_ahead(trainer, pl_module)
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

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._join(trainer, pl_module)
        if self._failure is not None:
            log.warning("the last rollouts: %s", self._failure)

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        self._drop()

    def _after_step(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        data, module = _parts(trainer, pl_module)
        if trainer.global_step == trainer.max_steps:
            # nothing would be trained on them; a run continued with more steps plays them
            for logger in trainer.loggers:
                logger.log_metrics(self._costs(data, module), step=trainer.global_step)
            return
        due = self.episodes and trainer.global_step % self.every_n_steps == 0
        if due and self.ahead:
            self._join(trainer, pl_module)
        if self._failure is not None:
            raise self._failure
        if due and self.ahead:
            self._play_ahead(trainer, pl_module)
        elif due:
            self._unfinished = {"marks": data.marks(), "state": self.state_dict()}
            self._collect(trainer, pl_module, self._next(data), self.exploration)
        self._done = trainer.global_step
        self._unfinished = None

    def _next(self, data: ReplayDataModule) -> Sequence[int]:
        """Numbers of the episodes of the next collection."""
        first = sum(data.marks())
        return range(first, first + self.episodes)

    def _play_ahead(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        data, module = _parts(trainer, pl_module)
        rollout, jobs = self._begin(data, module, self._next(data), self.exploration)
        self._running, self._owed = Ahead(rollout, jobs, module), False

    def _join(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Commit what was played ahead, once it has ended."""
        if self._running is None:
            return
        data, module = _parts(trainer, pl_module)
        age = module.backbone.versions["online"] - self._running.version
        played = self._running.wait()
        with whole():
            data.buffer.append_many(played.episodes)
            self._running = None
            self._report(trainer, played, {"rollout/staleness": float(age)})
        for episode in played.episodes:
            try:
                self._watch.see(episode)
            except TooManyFailures as error:  # not in the middle of a checkpoint
                self._failure = error

    def _drop(self) -> None:
        """Give up what is played ahead, since a stop should not wait for it."""
        if self._running is not None:
            self._running.drop()
            self._running, self._owed = None, True

    def _begin(
        self,
        data: ReplayDataModule,
        module: Algorithm,
        numbers: Sequence[int],
        exploration: Exploration,
    ) -> tuple[Rollout, Jobs]:
        """A rollout, and this process's part of the tasks."""
        barrier()  # all know where to begin before any episode is added
        # what several processes or another thread find is put together when they are done
        paths = dict(self._paths) if self.ahead or world_size() > 1 else self._paths
        rollout = Rollout(data.env, module.roles, self.limits, exploration, paths)
        return rollout, [self._job(number) for number in numbers][rank() :: world_size()]

    def _collect(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        numbers: Sequence[int],
        exploration: Exploration,
        show: bool = False,
    ) -> None:
        data, module = _parts(trainer, pl_module)
        shown = show and trainer.is_global_zero
        rollout, jobs = self._begin(data, module, numbers, exploration)

        def again(rounds: int) -> Jobs:
            return self._again(data.buffer, rounds)

        played = collect(data, module, rollout, jobs, again, self._watch, shown)
        scalars = self._report(trainer, played)
        if shown:
            log.info(
                "collected %.0f episodes (%.1f turns each, %.0f%% successful) in %.0f s",
                scalars["rollout/episodes"],
                scalars["rollout/turns"],
                100 * scalars["rollout/success"],
                played.seconds,
            )

    def _report(
        self, trainer: lightning.Trainer, played: Played, more: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Put together what all processes played, and log it."""
        data, module = _parts(trainer, trainer.lightning_module)
        totals = Totals.of(played, self._paths)
        self.turns += totals.turns
        self._paths |= totals.paths
        scalars = totals.scalars() | {"rollout/seconds": played.seconds}
        scalars |= self._costs(data, module)
        if isinstance(module.generator, VLLMGenerator):
            scalars["rollout/engine_gap"] = module.generator.hand_over.gap
        for logger in trainer.loggers:
            logger.log_metrics(scalars | (more or {}), step=trainer.global_step)
        return scalars

    def _costs(self, data: ReplayDataModule, module: Algorithm) -> dict[str, float]:
        """What all processes have played so far, the algorithm's own rollouts included."""
        branches = sums(gather(dict(module.counts)))
        return {
            "env/episodes": sum(data.marks()) + branches.get("branch_episodes", 0.0),
            "env/turns": self.turns + branches.get("branch_turns", 0.0),
        }

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
        return {"turns": self.turns, "paths": paths, "step": self._done, "owed": self._owed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.turns, self._done = state_dict["turns"], state_dict.get("step")
        self._owed = state_dict.get("owed", False)
        self._paths = {task: tuple(way) for task, way in state_dict["paths"].items()}

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        if self._running is not None:  # a resumed run then begins where this one goes on
            if trainer.interrupted:
                self._drop()
            else:
                self._join(trainer, pl_module)
            checkpoint["callbacks"][self.state_key] = self.state_dict()
        marks = None  # before and in the first collection: a continued run keeps what is there
        if self._unfinished is not None:
            marks = self._unfinished["marks"]
        elif self._done is not None:
            marks = _parts(trainer, pl_module)[0].marks()
        checkpoint["replay_high_water_marks"] = marks

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        self._resumed = True
        self._marks = checkpoint.get("replay_high_water_marks")


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
