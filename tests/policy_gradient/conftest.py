"""A bandit over words: one action decides, so what is learned shows within seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.base import Message, Session, Step, Task, TextEnv
from nlac_lightning.generation.base import Sampling
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import RolloutLimits

Reward = Callable[[str], float]


def holds_e(action: str) -> float:
    """1 for a word with an e."""
    return float("e" in action.lower())


class WordSession(Session):
    """Asks for words; each turn's reward follows from its word."""

    def __init__(self, task: Task, turns: int, reward: Reward) -> None:
        system: Message = {"role": "system", "content": "Say a good word."}
        self.opening = [system, {"role": "user", "content": f"Round {task.id}."}]
        self.left, self.reward = turns, reward

    def step(self, action: str) -> Step:
        self.left -= 1
        messages: list[Message] = [{"role": "user", "content": "Another word."}]
        return Step(messages if self.left else [], self.reward(action), terminated=not self.left)


class WordBandit(TextEnv):
    """Tasks differ by their name alone."""

    name = "word_bandit"

    def __init__(self, tasks: int = 4, turns: int = 1, reward: Reward = holds_e) -> None:
        self._tasks, self._turns, self._reward = tasks, turns, reward

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}{i}", split) for i in range(self._tasks)]

    def reset(self, task: Task, seed: int = 0) -> Session:
        return WordSession(task, self._turns, self._reward)


class Bench:
    """Builds algorithms on a tiny model and trains them on the bandit."""

    holds_e = staticmethod(holds_e)
    Env = WordBandit

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder

    def build(
        self,
        algorithm: type[Any],
        lr: float = 1e-2,
        tokens: int = 1,
        templates: str = "default",
        **options: Any,
    ) -> Any:
        """The algorithm on the tiny model, with short answers at a temperature other than 1."""
        policy = RoleConfig(sampling=Sampling(temperature=1.25, max_new_tokens=tokens))
        return algorithm(
            roles=RolesConfig(templates, format="plain", action="plain", policy=policy),
            backbone=BackboneConfig(self.model, lora_r=4, dtype="float32"),
            optimizer=OptimizerConfig(lr=lr, warmup_steps=0),
            **options,
        )

    def trainer(self, steps: int, limits: RolloutLimits | None = None) -> lightning.Trainer:
        """A Trainer with rollouts; the last of its callbacks records ``(step, metrics)``."""
        return lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=self.folder,
            callbacks=[RolloutCallback(limits=limits), Recorder()],
        )

    def fit(
        self, module: Algorithm, steps: int, env: TextEnv | None = None, **options: Any
    ) -> tuple[list[dict[str, float]], ReplayDataModule]:
        """Train; returns each step's metrics, and the data module with its buffer."""
        lightning.seed_everything(0)
        data = ReplayDataModule(env or WordBandit())
        trainer = self.trainer(steps, **options)
        trainer.fit(module, data)
        return trainer.callbacks[1].metrics, data  # type: ignore[attr-defined]

    @staticmethod
    def shake(module: Algorithm, std: float = 0.3) -> None:
        """Make the adapter differ from the base."""
        torch.manual_seed(1)
        for parameter in module.backbone.adapter_parameters("online").values():
            nn.init.normal_(parameter, std=std)


class Recorder(lightning.Callback):
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        values = trainer.callback_metrics.items()
        self.metrics.append({k.removeprefix("train/"): float(v) for k, v in values})


@pytest.fixture(scope="session")
def opinionated_path(tiny_llama_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a larger head: its final norm would keep it near uniform for ever."""
    folder = tmp_path_factory.mktemp("opinionated")
    shutil.copytree(tiny_llama_path, folder, dirs_exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(tiny_llama_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bench(opinionated_path: str, tmp_path: Path) -> Bench:
    """See :class:`Bench`."""
    return Bench(opinionated_path, tmp_path)
