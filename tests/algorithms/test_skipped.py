"""Losses and gradients that are no numbers, and batches with next to nothing in them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.algorithms.skipped import NumericsError
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Sampling
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, RolloutLimits


class Poisoned(NLAC):
    """The loss of each step is multiplied by the next factor, the gradient by the other kind."""

    def __init__(self, path: str, factors: list[float], gradients: bool, max_skipped: int) -> None:
        short = RoleConfig(sampling=Sampling(max_new_tokens=2, stop=("e", "a", "o")))
        super().__init__(
            improvement="accept",
            critic="none",
            base_action="buffer",
            loss=LossConfig(critic_weight=0.0),
            backbone=BackboneConfig(path, lora_r=2, dtype="float32"),
            optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0, max_skipped=max_skipped),
            roles=RolesConfig(
                templates="help_desk_small",
                format="plain",
                action="plain",
                policy=short,
                evaluator=short,
            ),
        )
        self.factors, self.gradients = factors, gradients
        self.norms: list[float] = []

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        factor = self.factors[self.global_step]
        if not self.gradients:
            loss = loss * factor
        super().manual_backward(loss, *args, **kwargs)
        if self.gradients:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor


class Watch(lightning.Callback):
    """The online adapter and the optimizer's step counts after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[Tensor], set[float]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = [
            p.detach().clone() for p in pl_module.backbone.adapter_parameters("online").values()
        ]
        states = trainer.optimizers[0].state.values()
        self.seen.append((weights, {float(s["step"]) for s in states}))


def fit(
    path: str,
    folder: Path,
    factors: list[float],
    gradients: bool = False,
    max_skipped: int = 10,
    **rollouts: Any,
) -> tuple[Poisoned, Watch]:
    module, watch = Poisoned(path, factors, gradients, max_skipped), Watch()
    options = {"initial_episodes": 2, "episodes": 0, "limits": RolloutLimits(max_turns=2)}
    always = Exploration("epsilon", 1.0)
    trainer = lightning.Trainer(
        max_steps=len(factors),
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[RolloutCallback(initial_exploration=always, **(options | rollouts)), watch],
    )
    data = ReplayDataModule(HelpDeskEnv(level=0, n_train=4), batch_size=3)
    trainer.fit(module, data)
    assert trainer.global_step == len(factors)
    return module, watch


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_no_number_changes_nothing_and_its_batch_is_kept(
    tiny_llama_path: str, tmp_path: Path, bad: float, gradients: bool
) -> None:
    module, watch = fit(tiny_llama_path, tmp_path, [1.0, bad, 1.0], gradients)
    assert module.counts["skipped_steps"] == 1
    (first, _), (second, _), (third, steps) = watch.seen
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(second, third, strict=True))
    assert steps == {2.0} and all(torch.isfinite(value).all() for value in third)
    (path,) = (tmp_path / "skipped").iterdir()
    kept = json.loads(path.read_text("utf-8"))
    assert path.name == "step_000002.json" and kept["step"] == 2
    assert "gradient norm" in kept["reason"] if gradients else "loss of" in kept["reason"]
    assert len(kept["batch"]) == 3
    stored = {(x["episode_id"], x["t"]) for x in kept["batch"]}
    assert stored <= {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(x["state_ids"] and x["turn"]["delta_ids"] for x in kept["batch"])


def test_steps_in_a_row_stop_the_run(tiny_llama_path: str, tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"3 gradient steps in a row.*loss of nan.*skipped"):
        fit(tiny_llama_path, tmp_path, [1.0] + [math.nan] * 5, max_skipped=3)
    assert len(list((tmp_path / "skipped").iterdir())) == 3
    # others in between begin the count again
    fit(tiny_llama_path, tmp_path / "b", [math.nan, math.nan, 1.0, math.nan], max_skipped=3)


def test_a_buffer_of_one_transition_trains(
    tiny_llama_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        module, watch = fit(
            tiny_llama_path,
            tmp_path,
            [1.0, 1.0],
            initial_episodes=1,
            limits=RolloutLimits(max_turns=1),
        )
    assert not module.counts["skipped_steps"] and "skipped" not in caplog.text
    assert any(not torch.equal(a, b) for a, b in zip(*(w for w, _ in watch.seen), strict=True))


def test_targets_of_no_length_have_no_part_in_the_loss(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=2, dtype="float32"))
    real = Example("policy", tuple(range(20)), 10)
    empty = Example("policy", tuple(range(5, 15)), 10)
    losses: list[Tensor] = []
    assert accumulate(backbone, [empty], 64, losses.append).get("policy") is None
    assert not losses
    alone = accumulate(backbone, [real], 64, losses.append)
    both = accumulate(backbone, [empty, real, empty], 64, losses.append)
    assert both == alone and torch.equal(losses[0], losses[1])


def test_the_limit_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"model\.optimizer\.max_skipped"):
        OptimizerConfig(max_skipped=0)
