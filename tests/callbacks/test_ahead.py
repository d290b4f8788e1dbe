"""Rollouts that run while the model trains: what they add, and what may go wrong in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from nlac_lightning.algorithms import base
from nlac_lightning.algorithms.config import ComputeConfig
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.callbacks import InterruptCheckpoint, RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.base import Session, Step, Task
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.failures import TooManyFailures
from nlac_lightning.generation.base import EngineError, Sampling
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import RolloutLimits

INITIAL, EPISODES = 4, 3


class Run:
    """Gradient steps with rollouts ahead every second.

    Attributes:
        logged: what was logged.
        engine: who plays.
    """

    def __init__(self, path: str, folder: Path, monkeypatch: Any, engine: Any) -> None:
        self.path, self.folder, self.engine = path, folder, engine
        self.logged: list[dict[str, float]] = []

        class Planned(VLLMGenerator):
            def __init__(self, backbone: Backbone, config: GenerationConfig) -> None:
                super().__init__(backbone, config, engine)

        monkeypatch.setattr(base, "VLLMGenerator", Planned)

    def fit(
        self,
        *callbacks: lightning.Callback,
        env: HelpDeskEnv | None = None,
        engine: Any = "vllm",
        steps: int = 6,
        ckpt_path: str | None = None,
        limits: RolloutLimits | None = None,
    ) -> NLAC:
        outer = self

        class Records(CSVLogger):
            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
                outer.logged.append(dict(metrics))

        policy = RoleConfig(sampling=Sampling(max_new_tokens=3))
        module = NLAC(
            improvement="accept",
            critic="none",
            base_action="buffer",
            loss=LossConfig(critic_weight=0.0, policy_kl=0.1),
            roles=RolesConfig(
                templates="help_desk_small", format="plain", action="plain", policy=policy
            ),
            backbone=BackboneConfig(self.path, lora_r=4, dtype="float32"),
            compute=ComputeConfig(generation=GenerationConfig(engine)),
        )
        self.rollouts = RolloutCallback(
            INITIAL, EPISODES, 2, limits=limits or RolloutLimits(max_turns=2), ahead=True
        )
        trainer = lightning.Trainer(
            max_steps=steps,
            limit_val_batches=0,
            accelerator="cpu",
            logger=Records(str(self.folder)),
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
            callbacks=[self.rollouts, *callbacks],
        )
        data = ReplayDataModule(env or HelpDeskEnv(level=0, n_train=8), batch_size=2)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return module

    def episodes(self) -> list[Episode]:
        with ReplayBuffer(self.folder / "replay.sqlite") as buffer:
            return list(buffer.iter_episodes())

    def staleness(self) -> list[float]:
        return [m["rollout/staleness"] for m in self.logged if "rollout/staleness" in m]


@pytest.fixture
def make(tiny_llama_path: str, tmp_path: Path, monkeypatch: Any, peft_engine: Any) -> Any:
    def make(engine: type[Any] = peft_engine) -> Run:
        return Run(tiny_llama_path, tmp_path, monkeypatch, engine(tiny_llama_path))

    return make


def test_they_join_the_buffer_one_collection_later(make: Any) -> None:
    run = make()
    run.fit()
    episodes = run.episodes()
    assert run.staleness() == [2.0, 2.0], "none follows the last step"
    assert len({e.seed for e in episodes}) == len(episodes) == INITIAL + 2 * EPISODES
    versions = [{t.policy_version for t in e.turns} for e in episodes]
    assert versions == [{0}] * 4 + [{2}] * 3 + [{4}] * 3, "each with the adapter of its beginning"
    gaps = [m["rollout/engine_gap"] for m in run.logged if "rollout/seconds" in m]
    assert len(gaps) == 3 and 0 < max(gaps) < 1e-4
    assert not any(Path(folder).exists() for folder in run.engine.folders), "at the run's end"


def test_they_need_another_process(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.ahead"):
        make().fit(engine="in_process")


class HangsOnce(HelpDeskEnv):
    """One step of the tasks played ahead never ends."""

    hung = False

    def reset(self, task: Task, seed: int = 0) -> Session:
        session = super().reset(task, seed)
        step = session.step

        def hang(action: str) -> Step:
            if threading.current_thread() is not threading.main_thread() and not HangsOnce.hung:
                HangsOnce.hung = True
                time.sleep(3600)
            return step(action)

        session.step = hang  # type: ignore[method-assign]
        return session


def test_an_environment_that_hangs_costs_one_episode(make: Any) -> None:
    run, began = make(), time.monotonic()
    limits = RolloutLimits(max_turns=2, call_seconds=1.0)
    run.fit(env=HangsOnce(level=0, n_train=8), limits=limits)
    assert time.monotonic() - began < 60
    played = run.episodes()[INITIAL:]
    assert HangsOnce.hung and len(played) == 2 * EPISODES
    [cut] = [e for e in played if e.reason == "env_error"]
    assert "TimeoutError: no answer within 1 s" in cut.turns[-1].info["error"]


def dies(peft_engine: Any, share: float) -> type[Any]:
    """An engine that dies in that share of the calls that come from rollouts ahead."""

    class Dies(peft_engine):  # type: ignore[misc]
        calls = 0.0

        def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if threading.current_thread().name == "rollouts":
                self.calls += share
                if self.calls >= 1.0:
                    self.calls -= 1.0
                    raise EngineError("vLLM: its process ended with status -9")
            return super().complete(requests)

    return Dies


def test_an_engine_that_dies_costs_the_episodes_that_waited(make: Any, peft_engine: Any) -> None:
    run = make(dies(peft_engine, 0.25))
    run.fit(steps=8)
    played = run.episodes()[INITIAL:]
    failed = [e for e in played if e.reason == "policy_failed"]
    assert len(played) == 3 * EPISODES and 0 < len(failed) < len(played)
    assert all("status -9" in e.turns[-1].info["error"] for e in failed)


class EveryStep(lightning.Callback):
    """A checkpoint after each step, at which what runs ahead is joined."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "every.ckpt"))


@pytest.mark.parametrize("joined_by", [(), (EveryStep,)])
def test_too_many_failures_stop_the_run_with_a_checkpoint(
    make: Any, peft_engine: Any, joined_by: Sequence[Any], tmp_path: Path
) -> None:
    run = make(dies(peft_engine, 1.0))
    with pytest.raises(TooManyFailures, match="policy_failed"):
        run.fit(*(kind() for kind in joined_by), InterruptCheckpoint(), steps=20)
    steps = [m["rollout/staleness"] for m in run.logged if "rollout/staleness" in m]
    assert len(run.episodes()) == INITIAL + len(steps) * EPISODES, "what was played is kept"
    assert (tmp_path / "last.ckpt").is_file()


class Stop(lightning.Callback):
    """Ctrl-C in the third step."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            self.at = time.monotonic()
            raise KeyboardInterrupt


def blocked(peft_engine: Any) -> type[Any]:
    """An engine that does not answer the rollouts ahead while ``blocks`` is set."""

    class Blocked(peft_engine):  # type: ignore[misc]
        blocks = threading.Event()
        goes_on = threading.Event()

        def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if self.blocks.is_set() and threading.current_thread().name == "rollouts":
                self.goes_on.wait(300)
            return super().complete(requests)

    return Blocked


def test_a_stop_does_not_wait_and_its_seeds_are_played_again(make: Any, peft_engine: Any) -> None:
    run, stop = make(blocked(peft_engine)), Stop()
    run.engine.blocks.set()
    with pytest.raises(SystemExit):
        run.fit(stop, InterruptCheckpoint())
    assert time.monotonic() - stop.at < 10
    assert len(run.episodes()) == INITIAL
    run.engine.blocks.clear()
    run.engine.goes_on.set()
    run.fit(InterruptCheckpoint(), ckpt_path=str(run.folder / "last.ckpt"))
    seeds = [e.seed for e in run.episodes()]
    assert seeds == list(range(INITIAL + 2 * EPISODES)), "none is left out"
    versions = [{t.policy_version for t in e.turns} for e in run.episodes()]
    assert versions == [{0}] * 4 + [{3}] * 3 + [{4}] * 3
