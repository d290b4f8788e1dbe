"""``nlac doctor``: counts against the real model, and a report that a config changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nlac_lightning import doctor, estimate
from nlac_lightning.algorithms.config import ComputeConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.configs_path import CONFIGS
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.roles import RoleConfig, RolesConfig


@pytest.fixture(scope="module")
def config(tiny_llama_path: str) -> BackboneConfig:
    return BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")


def test_sizes_are_those_of_the_loaded_model(config: BackboneConfig) -> None:
    size, backbone = estimate.model_size(config), Backbone(config)
    own = {n: p.numel() for n, p in backbone.model.named_parameters()}
    assert size.weights == sum(n for name, n in own.items() if "lora_" not in name)
    adapter = backbone.adapter_parameters("online").values()
    assert size.adapter == sum(p.numel() for p in adapter)
    generator = InProcessGenerator(backbone)
    generator.generate([Request((5, 6, 7, 8), Sampling(max_new_tokens=1))])
    (node,) = generator._caches["online"].root.children.values()
    assert node.kv is not None and node.kv.numel() == 4 * size.cached


def test_a_4_bit_base_is_counted_as_it_is_stored(tiny_llama_path: str) -> None:
    config = BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32", quantization="nf4")
    module = NLAC(backbone=config)
    told = estimate.memory(module, estimate.model_size(config), 100)["base weights"]
    stored = 0.0
    for name, p in Backbone(config).model.named_parameters():
        if "lora_" not in name:
            stored += p.numel() * p.element_size()  # two 4-bit weights lie in a byte
            if hasattr(p, "quant_state"):
                stored += p.quant_state.absmax.numel() * p.quant_state.absmax.element_size()
    assert told == pytest.approx(stored, rel=0.02)


def test_tokens_of_an_update(config: BackboneConfig) -> None:
    """Prompts with a shared system message are read once; longer answers cost more steps."""

    def tokens(limit: int) -> estimate.UpdateTokens:
        sampling = Sampling(max_new_tokens=limit)
        roles = ("policy", "successor", "backup", "evaluator", "refinement")
        module = NLAC(
            backbone=config,
            roles=RolesConfig(
                templates="help_desk_small",
                format="plain",
                action="plain",
                **{role: RoleConfig(sampling=sampling) for role in roles},
            ),
        )
        data = ReplayDataModule(HelpDeskEnv(level=0, n_train=8), batch_size=4)
        return estimate.update_tokens(module, data)

    short, long = tokens(5), tokens(10)
    assert short.steps == 7 * 5 and long.steps == 7 * 10
    assert 0 < short.shared <= short.state < short.prefilled < short.naive
    assert long.trained == 2 * short.trained == 2 * 4 * 2 * 5


def test_memory_follows_the_settings(config: BackboneConfig) -> None:
    size = estimate.model_size(config)

    def memory(**options: int) -> dict[str, float]:
        module = NLAC(backbone=config, compute=ComputeConfig(**options))
        return estimate.memory(module, size, 100)

    plain, larger = memory(), memory(train_pack_tokens=2048, cache_tokens=40_000)
    changed = {name for name in plain if plain[name] != larger[name]}
    assert changed == {
        "activations of a training pack",
        "attention mask of a training pack",
        "prefix caches",
    }
    assert plain["base weights"] == size.weights * torch.float32.itemsize


def test_the_report(tiny_llama_path: str, tmp_path: Path) -> None:
    options = ["--config", str(CONFIGS / "quickstart.yaml")]
    options += ["--config", str(CONFIGS / "strategy/ddp.yaml")]
    options += ["--model.init_args.backbone.name", tiny_llama_path]
    options += ["--model.init_args.backbone.target_modules", "all-linear"]
    options += ["--trainer.default_root_dir", str(tmp_path)]
    text = doctor.report(options)
    for part in ("CPU cores", "bitsandbytes 0", "dtype:", "base weights", "decoding", "in all"):
        assert part in text
    assert "The config" not in doctor.report([])
