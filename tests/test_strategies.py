"""The strategy overlays over real configs, and a QLoRA step on the CPU."""

from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.nn import functional as F

from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.configs_path import CONFIGS, packaged_configs
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.lightning_cli import NLACCommandLine
from nlac_lightning.sharding import WholeAdapters, check_strategy

SEVERAL = ("strategy/ddp", "strategy/fsdp", "strategy/fsdp2")


@pytest.mark.parametrize("overlay", [n for n in packaged_configs() if n.startswith("strategy/")])
def test_overlays_fit_the_quickstart(overlay: str, tmp_path: Path) -> None:
    files = [str(CONFIGS / f"{name}.yaml") for name in ("quickstart", overlay)]
    paths = [word for file in files for word in ("--config", file)]
    if overlay == "strategy/fsdp" and not torch.cuda.is_available():
        paths += ["--trainer.accelerator", "cpu"]
    # that two processes train is test_distributed's
    line = NLACCommandLine.run_from(
        [*paths, "--trainer.default_root_dir", str(tmp_path)], run=False
    )
    config = line.model.backbone_config  # type: ignore[attr-defined]
    assert config.name == "smollm2-135m-instruct", "the overlay replaces nothing else"
    assert config.quantization == ("nf4" if overlay == "strategy/qlora" else "none")
    assert line.trainer.num_devices == (2 if overlay in SEVERAL else 1)
    assert isinstance(line.trainer.strategy, WholeAdapters) == (overlay in SEVERAL[1:])


def test_a_4_bit_base_cannot_be_sharded(tiny_llama_path: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, quantization="nf4", dtype="float32"))
    with pytest.raises(ConfigError, match=r"backbone\.quantization"):
        backbone.shard(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy])
def test_strategies_that_shard_the_adapters_are_refused(strategy: type[Strategy]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.strategy.*ShardedBaseStrategy"):
        check_strategy(strategy())


def test_a_qlora_step_equals_that_of_the_dequantised_base(tiny_llama_path: str) -> None:
    config = BackboneConfig(tiny_llama_path, lora_r=4, quantization="nf4", dtype="float32")
    backbone = Backbone(config)
    quantised = [m for m in backbone.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) == 14, "seven linear layers in each of two decoder layers"
    torch.manual_seed(0)
    online = backbone.adapter_parameters("online")
    for parameter in online.values():
        nn.init.normal_(parameter, std=0.1)
    before = [m.weight.data.clone() for m in quantised]
    ids = tuple(range(50, 90))
    examples = [Example("policy", ids, 30)]
    metrics = accumulate(backbone, examples, 64, torch.Tensor.backward)
    grads = {name: p.grad.clone() for name, p in online.items() if p.grad is not None}
    assert len(grads) == len(online)

    plain = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32"))
    layers = {n: m for n, m in plain.model.named_modules() if isinstance(m, nn.Linear)}
    for name, module in backbone.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            layers[name].weight.data.copy_(weight)
    own = plain.adapter_parameters("online")
    for name, parameter in own.items():
        parameter.data.copy_(online[name])
    with plain.use("online"):
        logits = plain.model(torch.tensor([ids])).logits[0, 29:-1]
    loss = F.cross_entropy(logits, torch.tensor(ids[30:]))
    loss.backward()
    assert metrics["policy"] == pytest.approx(float(loss), rel=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, own[name].grad, rtol=1e-3, atol=1e-5)

    torch.optim.AdamW(online.values(), lr=1e-2).step()
    assert all(torch.equal(m.weight.data, w) for m, w in zip(quantised, before, strict=True))
    out = InProcessGenerator(backbone).generate([Request(ids, Sampling(max_new_tokens=4))])
    assert len(out[0].ids) == 4
