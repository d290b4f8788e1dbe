"""The quickstart's loop on a tiny random model, for benchmarks that need many runs or long ones."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

from nlac_lightning import models
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import EMACallback, InterruptCheckpoint, RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.evaluation.evaluate import EvaluationConfig
from nlac_lightning.generation.base import Sampling
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, RolloutLimits


def make_model(folder: Path) -> Path:
    """A random two-layer Llama with SmolLM2's tokenizer in ``folder``, made once."""
    if not (folder / "config.json").is_file():
        tokenizer = models.load_tokenizer(models.resolve(models.SMOLLM2))
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_run(
    folder: Path,
    model: Path,
    steps: int,
    capacity: int = 100_000,
    batch_size: int = 3,
    every_n_steps: int = 2,
    extra: list[lightning.Callback] | None = None,
) -> tuple[lightning.Trainer, NLAC, ReplayDataModule]:
    """Trainer, algorithm and data of a run in ``folder``: NLAC on the help desk, seed 0.

    It collects episodes before training and every ``every_n_steps`` gradient steps, moves the
    target adapter, and writes ``last.ckpt`` after each step.
    """
    lightning.seed_everything(0, verbose=False)

    def role(adapter: str, temperature: float) -> RoleConfig:
        # a random model hardly ever ends a line
        sampling = Sampling(temperature, max_new_tokens=4, stop=("e", "a", "o"))
        return RoleConfig(adapter, "none" if adapter == "target" else "state", sampling)

    module = NLAC(
        improvement="accept",
        base_action="buffer",
        critic="none",  # every stored action is distilled, so that each step changes the adapter
        loss=LossConfig(policy_kl=0.1),
        backbone=BackboneConfig(str(model), lora_r=4, lora_dropout=0.1, dtype="float32"),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        roles=RolesConfig(
            templates="help_desk_small",
            format="plain",
            action="plain",
            policy=role("online", 1.0),
            successor=role("online", 1.0),
            backup=role("target", 1.0),
            evaluator=role("base", 0.0),
            refinement=role("online", 0.0),
        ),
        evaluation=EvaluationConfig(critic_steps=0),
    )
    rollouts = RolloutCallback(
        initial_episodes=6,
        episodes=2,
        every_n_steps=every_n_steps,
        initial_exploration=Exploration("epsilon", 0.6),
        exploration=Exploration("epsilon", 0.6),
        limits=RolloutLimits(max_turns=3, parallel=1),
    )
    checkpoints = ModelCheckpoint(
        folder / "checkpoints",
        save_last=True,
        save_top_k=0,
        every_n_train_steps=1,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        callbacks=[rollouts, EMACallback(0.1), InterruptCheckpoint(), checkpoints, *(extra or [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    data = ReplayDataModule(
        HelpDeskEnv(level=0, n_train=64, n_val=4, n_test=4),
        capacity=capacity,
        batch_size=batch_size,
    )
    return trainer, module, data
