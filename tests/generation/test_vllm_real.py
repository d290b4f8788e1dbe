"""The real vLLM, where ``NLAC_VLLM_PYTHON`` names the Python of an environment that has it.

docs/scale.md says how to make one for CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig

PYTHON = os.environ.get("NLAC_VLLM_PYTHON", "")
OPTIONS = {
    "max_model_len": 512,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**28,
}

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="NLAC_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def backbone(smollm2_path: str) -> Backbone:
    return Backbone(BackboneConfig(smollm2_path, lora_r=8, dtype="float32"))


@pytest.fixture(scope="module")
def generator(backbone: Backbone) -> Iterator[VLLMGenerator]:
    generator = VLLMGenerator(backbone, GenerationConfig("vllm", PYTHON, options=OPTIONS))
    yield generator
    generator.close()


def test_the_whole_loop(backbone: Backbone, generator: VLLMGenerator) -> None:
    """Rollout, update, hand-over, changed output: greedy texts follow the trained adapter."""
    ids = tuple(backbone.tokenizer("The capital of France is")["input_ids"])
    wanted = tuple(backbone.tokenizer(" a blue whale.")["input_ids"])
    request = Request(ids, Sampling(max_new_tokens=len(wanted)))
    before = generator.generate([request, replace(request, adapter="base")])
    assert before[0].ids == before[1].ids, "an adapter of zeros changes nothing"
    assert before[0].ids == InProcessGenerator(backbone).generate([request])[0].ids
    online = backbone.adapter_parameters("online").values()
    optimizer = torch.optim.AdamW(online, lr=3e-3)
    for _ in range(12):
        optimizer.zero_grad()
        accumulate(backbone, [Example("policy", ids + wanted, len(ids))], 64, torch.Tensor.backward)
        optimizer.step()
    backbone.versions["online"] += 1
    after = generator.generate([request, replace(request, adapter="base")])
    assert after[0].ids == wanted != before[0].ids, after[0].text
    assert after[1].ids == before[1].ids, "the base is asked in one call with the new adapter"
    assert after[0].version == backbone.versions["online"]
