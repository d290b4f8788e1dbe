"""Measures a run in the language MDP while it trains, exactly and beside its costs."""

from __future__ import annotations

import time
from typing import Any

import lightning
import numpy as np

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.analysis.language_model import (
    critic_scores,
    critic_table,
    policy_table,
    role_skills,
)
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.solve import discounted, evaluate, greedy
from nlac_lightning.errors import ConfigError, require_positive


class ExactProgress(lightning.Callback):
    """Exact success, critic and costs before training and every few gradient steps.

    The critic is measured as the adapter that plays the successor model.

    List it after RolloutCallback, whose first episodes then count. The time that measuring takes is
    left out of ``cpu_seconds``.

    Args:
        every_n_steps: gradient steps between measurements.
        max_episodes: training ends once so many episodes were played; None never does.
        skill_worlds: random worlds on which the roles' skills are asked before and after
            training; 0 does not ask.

    Attributes:
        rows: one measurement each; keys are ``step``, ``episodes``, ``generated_tokens``,
            ``cpu_seconds``, ``success`` (test tasks), ``train_success``, ``valid``,
            ``critic_success`` (of the policy that is greedy in the critic), and those of
            :func:`~nlac_lightning.analysis.language_model.critic_scores`: beside the policy's Q
            and, as ``target_...``, beside the Q that the critic's own targets converge to, which
            is discounted where the loss is.
        skills: the roles' skills before and after training.
    """

    def __init__(
        self, every_n_steps: int = 25, max_episodes: int | None = None, skill_worlds: int = 0
    ) -> None:
        require_positive("exact_progress.every_n_steps", every_n_steps)
        if max_episodes is not None:
            require_positive("exact_progress.max_episodes", max_episodes)
        require_positive("exact_progress.skill_worlds", skill_worlds, zero=True)
        self.every_n_steps, self.max_episodes = every_n_steps, max_episodes
        self.skill_worlds = skill_worlds
        self.rows: list[dict[str, float]] = []
        self.skills: list[dict[str, float]] = []
        self._began = self._measuring = 0.0

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        self._began = time.process_time()  # before the first rollouts, whose callback comes first

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._measure(trainer, pl_module)
        self._ask(pl_module)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        played = self._episodes(trainer, pl_module)
        if self.max_episodes is not None and played >= self.max_episodes:
            trainer.should_stop = True
        if trainer.global_step % self.every_n_steps == 0:
            self._measure(trainer, pl_module)

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if trainer.global_step > self.rows[-1]["step"]:
            self._measure(trainer, pl_module)
        self._ask(pl_module)

    @staticmethod
    def _episodes(trainer: Any, module: Any) -> int:
        return trainer.datamodule.buffer.high_water_mark + module.counts["branch_episodes"]

    def _measure(self, trainer: Any, pl_module: Any) -> None:
        began = time.process_time()
        data = trainer.datamodule
        if not isinstance(data, ReplayDataModule) or not isinstance(data.env, LanguageMDPEnv):
            raise ConfigError("trainer.callbacks", "ExactProgress needs LanguageMDPEnv", "drop it")
        assert isinstance(pl_module, Algorithm)
        env, backbone, roles = data.env, pl_module.backbone, pl_module.roles
        policy = policy_table(backbone, roles, env)
        critic = critic_table(backbone, roles, env, roles.settings("successor").adapter)
        mdp = env.world.exact.mdp
        scores = critic_scores(env, evaluate(mdp, policy).q, critic)
        loss = getattr(pl_module, "loss", None)
        taught = discounted(mdp, policy, loss.discount if loss is not None else 1.0)
        scores |= {f"target_{k}": v for k, v in critic_scores(env, taught, critic).items()}
        costs = {
            "step": trainer.global_step,
            "episodes": self._episodes(trainer, pl_module),
            "generated_tokens": pl_module.generator.counts["generated_tokens"],
            "cpu_seconds": began - self._began - self._measuring,
        }
        quality = {
            "success": env.success(policy, "test"),
            "train_success": env.success(policy, "train"),
            "critic_success": env.success(greedy(mdp, np.nan_to_num(critic)), "test"),
            "valid": float((policy * mdp.allowed).sum(-1).mean()),
        }
        self.rows.append(costs | quality | scores)
        self._measuring += time.process_time() - began

    def _ask(self, pl_module: Any) -> None:
        began = time.process_time()
        if self.skill_worlds:
            found = role_skills(pl_module.backbone, pl_module.roles, worlds=self.skill_worlds)
            self.skills.append(found)
        self._measuring += time.process_time() - began
