"""The target adapter is the moving average of the online one, step by step."""

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.callbacks import EMACallback
from nlac_lightning.errors import ConfigError

STEPS = 6


class Drift(Algorithm):
    """Trains by adding noise to the online adapter: any training will do for the average."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.backbone.adapter_parameters("online").values():
                nn.init.normal_(parameter, std=0.1)
        optimizer = self.optimizers()
        optimizer.step()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(STEPS))


class Watch(EMACallback):
    """Keeps both adapters before and after each step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = [copies(pl_module.backbone)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.seen.append(copies(pl_module.backbone))


def copies(backbone: Backbone) -> dict[str, dict[str, Tensor]]:
    return {
        adapter: {n: p.detach().clone() for n, p in backbone.adapter_parameters(adapter).items()}
        for adapter in ("online", "target")
    }


def fit(path: str, callback: EMACallback, tmp_path: Any) -> Drift:
    module = Drift(BackboneConfig(path, lora_r=2, dtype="float32"))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    assert trainer.global_step == STEPS
    return module


@pytest.mark.parametrize("every", [1, 2])
def test_target_is_the_moving_average(tiny_llama_path: str, tmp_path: Any, every: int) -> None:
    tau = 0.3
    watch = Watch(tau, every)
    module = fit(tiny_llama_path, watch, tmp_path)
    first = watch.seen[0]
    for name, value in first["online"].items():
        assert torch.equal(value, first["target"][name]), "the target starts equal"
    expected = {name: value.double() for name, value in first["target"].items()}
    for step, now in enumerate(watch.seen[1:], start=1):
        for name in expected:
            if step % every == 0:
                expected[name] = (1 - tau) * expected[name] + tau * now["online"][name].double()
            torch.testing.assert_close(
                now["target"][name].double(), expected[name], atol=1e-6, rtol=1e-5
            )
    target = module.backbone.adapter_parameters("target")
    assert not any(p.requires_grad for p in target.values())
    assert module.backbone.versions["target"] == 1 + STEPS // every, "caches see each update"
    trained = {id(p) for g in module.optimizers().param_groups for p in g["params"]}
    assert not trained & {id(p) for p in target.values()}
    assert {name for name in module.state_dict() if ".target." in name}, "it is checkpointed"


def test_tau_one_copies(tiny_llama_path: str, tmp_path: Any) -> None:
    watch = Watch(1.0)
    fit(tiny_llama_path, watch, tmp_path)
    for now in watch.seen:
        for name, value in now["online"].items():
            torch.testing.assert_close(now["target"][name], value)


@pytest.mark.parametrize("tau", [0.0, -0.1, 1.1])
def test_tau_out_of_bounds_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=r"ema\.tau"):
        EMACallback(tau)


def test_every_n_steps_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"ema\.every_n_steps"):
        EMACallback(every_n_steps=0)
