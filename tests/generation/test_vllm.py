"""vLLM's side of generation: the hand-over of adapters, and what is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.errors import ConfigError, StoppedRun
from nlac_lightning.generation.base import ADAPTERS, TOO_LONG, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig

PROMPT = (11, 12, 13, 14, 15)


@pytest.fixture
def backbone(tiny_llama_path: str) -> Backbone:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32"))
    shake(backbone, 1)
    return backbone


def shake(backbone: Backbone, seed: int) -> None:
    torch.manual_seed(seed)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            nn.init.normal_(parameter, std=0.4)
        backbone.versions[adapter] += 1


def test_handed_over_adapters_answer_like_the_model_itself(
    backbone: Backbone, peft_engine: Any
) -> None:
    """Also after an update, and the text is cut as that of the engine in the process."""
    own = InProcessGenerator(backbone)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), peft_engine(backbone.config.name))
    sampling = Sampling(max_new_tokens=4)
    for seed in (2, 3):
        asked = [Request(PROMPT, sampling, adapter) for adapter in ADAPTERS]
        stop = own.generate(asked)[0].ids[1]
        asked += [replace(asked[0], stop_ids=(stop,))]
        for ours, theirs in zip(own.generate(asked), generator.generate(asked), strict=True):
            assert (theirs.ids, theirs.text) == (ours.ids, ours.text)
            assert theirs.finish_reason == ours.finish_reason and theirs.version == ours.version
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        shake(backbone, seed)
    assert generator.hand_over.number == 5, "two adapters, twice, and the base once"
    generator.close()


def test_an_engine_that_keeps_old_weights_is_an_error(backbone: Backbone, peft_engine: Any) -> None:
    """Also where the step was as small as real ones are, far below the tolerance."""
    engine = peft_engine(backbone.config.name, stale=True)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    generator.generate([Request(PROMPT)])
    with torch.no_grad():
        for parameter in backbone.adapter_parameters("online").values():
            parameter.add_(0.005 * torch.randn_like(parameter))
    backbone.versions["online"] += 1
    with pytest.raises(StoppedRun, match="does not answer with version"):
        generator.generate([Request(PROMPT)])


def test_raw_log_probabilities_are_refused_with_the_flag(
    backbone: Backbone, peft_engine: Any
) -> None:
    generator = VLLMGenerator(
        backbone, GenerationConfig("vllm"), peft_engine(backbone.config.name, raw=True)
    )
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        generator.generate([Request(PROMPT)])


def test_folders_of_old_versions_go_once_nobody_asks_them(
    backbone: Backbone, peft_engine: Any
) -> None:
    engine = peft_engine(backbone.config.name)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    pinned = generator.pinned()
    root = Path(engine.folders[0]).parent
    old = generator.generate([Request(PROMPT)])[0]
    for seed in (2, 3, 4):
        shake(backbone, seed)
        generator.generate([Request(PROMPT), Request(PROMPT, adapter="target")])
        assert len(list(root.iterdir())) == 5, "three are pinned, and two of them are replaced"
    assert pinned.generate([Request(PROMPT)])[0] == old
    pinned.release()
    names = {folder.name.rpartition("-")[0] for folder in root.iterdir()}
    assert names == {"base-0", *(f"{a}-{backbone.versions[a]}" for a in ("online", "target"))}
    assert len(engine.forgotten) == 6 and not any(Path(f).exists() for f in engine.forgotten)
    with pytest.raises(RuntimeError, match="nobody waits"):
        pinned.generate([Request(PROMPT)])
    generator.close()
    assert not root.exists()


def test_prompts_beyond_the_engine_s_reach_are_not_asked(
    backbone: Backbone, peft_engine: Any
) -> None:
    engine = peft_engine(backbone.config.name, max_tokens=64)
    generator = VLLMGenerator(backbone, GenerationConfig("vllm"), engine)
    lengths = (65, 64, 62, 5)
    outs = generator.generate([Request((7,) * n, Sampling(max_new_tokens=4)) for n in lengths])
    assert [out.finish_reason for out in outs] == [TOO_LONG, TOO_LONG, "length", "length"]
    assert [len(out.ids) for out in outs] == [0, 0, 2, 4]
    assert generator.counts["too_long"] == 2


def test_a_wrong_interpreter_is_a_wrong_setting(backbone: Backbone, peft_engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.compute\.generation\.python"):
        VLLMGenerator(backbone, GenerationConfig("vllm", python="/no/such/python"))
