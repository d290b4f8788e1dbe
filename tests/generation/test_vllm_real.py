"""The real vLLM, where ``NLAC_VLLM_PYTHON`` names the Python of an environment that has it.

docs/scale.md says how to make one for CPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import ADAPTERS, TOO_LONG, EngineError, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.generation.vllm import VLLMGenerator
from nlac_lightning.generation.vllm_engines import GenerationConfig
from nlac_lightning.prefix_tree import pack_tree

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


def test_log_probabilities_are_those_of_the_model_itself(
    backbone: Backbone, generator: VLLMGenerator
) -> None:
    """For each adapter and way of drawing, along the texts that vLLM drew."""
    with torch.no_grad():
        for adapter in ("online", "target"):
            for parameter in backbone.adapter_parameters(adapter).values():
                parameter.add_(0.02 * torch.randn_like(parameter))
            backbone.versions[adapter] += 1
    ids = tuple(backbone.tokenizer("User: where is my order?\nAgent:")["input_ids"])
    ways = [Sampling(), Sampling(1.0), Sampling(0.7, 0.9), Sampling(1.3, 1.0, 40)]
    requests = [
        Request(ids, replace(way, max_new_tokens=8), adapter, seed=n)
        for n, way in enumerate(ways)
        for adapter in ADAPTERS
    ]
    outs = generator.generate(requests)
    assert generator.generate(requests) == outs, "a seed decides"
    for request, out in zip(requests, outs, strict=True):
        for n, (token, theirs) in enumerate(zip(out.ids, out.logprobs, strict=True)):
            path = request.ids + out.ids[:n]
            own = log_p(backbone, request.adapter, path, request.sampling)
            assert float(own[token]) == pytest.approx(theirs, abs=2e-3), (request, n)


def log_p(
    backbone: Backbone, adapter: str, path: tuple[int, ...], sampling: Sampling
) -> torch.Tensor:
    """The distribution of the next token, by definition: temperature, then top-k, then top-p."""
    with torch.no_grad(), backbone.use(adapter):
        logits = backbone.logits(backbone.forward_tree(pack_tree([path]))[-1:]).double()[0]
    values, order = (logits / (sampling.temperature or 1.0)).sort(descending=True)
    p = values[: sampling.top_k or None].softmax(-1)
    p = p[p.cumsum(-1) - p < sampling.top_p]
    return torch.full_like(logits, -torch.inf).scatter(0, order[: len(p)], (p / p.sum()).log())


def test_prefixes_are_computed_once(backbone: Backbone, generator: VLLMGenerator) -> None:
    """Across calls, and not across versions, whose keys and values differ."""
    rules = tuple(backbone.tokenizer("Refunds need a receipt. " * 64)["input_ids"])[:300]
    asked = [Request((*rules, 40 + n), Sampling(max_new_tokens=2)) for n in range(4)]

    def prefilled(requests: list[Request]) -> int:
        before = generator.counts["prefilled_tokens"]
        generator.generate(requests)
        return generator.counts["prefilled_tokens"] - before

    assert prefilled(asked[:1]) == 301
    assert prefilled(asked[1:]) == 3 * (301 - 256), "CPU blocks hold 128 tokens"
    backbone.versions["online"] += 1
    assert prefilled(asked[:1]) == 301


def test_prompts_at_the_limit_do_not_harm_the_others(generator: VLLMGenerator) -> None:
    lengths = (600, 512, 511, 20)
    outs = generator.generate([Request((40,) * n, Sampling(max_new_tokens=4)) for n in lengths])
    assert [out.finish_reason for out in outs] == [TOO_LONG, TOO_LONG, "length", "length"]
    assert [len(out.ids) for out in outs] == [0, 0, 1, 4]
    unknown = Request((10**6,), Sampling(max_new_tokens=4))  # no such token
    outs = generator.generate([Request((40,) * 20, Sampling(max_new_tokens=4)), unknown])
    assert [out.finish_reason for out in outs] == ["length", "failed"]


def test_a_killed_engine_costs_one_call(backbone: Backbone, generator: VLLMGenerator) -> None:
    """Its own processes go as well; the next call starts it again, with the adapters of before."""
    request = Request((40, 41, 42), Sampling(max_new_tokens=4))
    before = generator.generate([request])
    group = generator._engine._process.pid
    assert len(members(group)) > 1
    os.kill(group, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9"):
        generator.generate([replace(request, once=True)])
    until = time.monotonic() + 10
    while members(group) and time.monotonic() < until:
        time.sleep(0.1)
    assert not members(group)
    assert generator.generate([request]) == before
    os.kill(generator._engine._process.pid, signal.SIGKILL)
    assert generator.generate([request]) == before, "what is no rollout is asked again"


def members(group: int) -> list[str]:
    """Processes of a group that are not zombies."""
    lines = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    found = [line.split() for line in lines.splitlines()]
    return [stat for pgid, stat in found if pgid == str(group) and not stat.startswith("Z")]


FLAGS = (
    "--dtype float32 --enable-lora --max-loras 3 --max-lora-rank 8 --max-model-len 512 "
    f"--enforce-eager --max-num-seqs 8 --kv-cache-memory-bytes {2**28}"
).split()
PROCESSED = ["--logprobs-mode", "processed_logprobs"]


@contextmanager
def serving(model: str, port: int, *flags: str) -> Iterator[str]:
    """Address of a real server on the model."""
    where = ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *where, *FLAGS, *flags],
        env={**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1.0)
        assert process.poll() is None
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_server_answers_the_same_and_again_after_it_was_killed(
    backbone: Backbone, smollm2_path: str, port: int
) -> None:
    ids = tuple(backbone.tokenizer("User: where is my order?\nAgent:")["input_ids"])
    asked = [Request(ids, Sampling(max_new_tokens=6), adapter) for adapter in ADAPTERS]
    own = InProcessGenerator(backbone).generate(asked)
    with serving(smollm2_path, port, *PROCESSED) as url:
        config = GenerationConfig("vllm_server", server=url)
        generator = VLLMGenerator(backbone, config)
        before = generator.generate(asked)
        for ours, theirs in zip(own, before, strict=True):
            assert theirs.ids == ours.ids and theirs.version == ours.version
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=2e-3)
        backbone.versions["online"] += 1
        generator.generate(asked)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            assert answer.read().count(b"nlac_adapters_") == 3, "old versions were unloaded"
    with pytest.raises(EngineError):
        generator.generate([replace(asked[0], once=True)])
    with serving(smollm2_path, port, *PROCESSED):
        assert [out.ids for out in generator.generate(asked)] == [out.ids for out in before]


def test_a_server_with_raw_log_probabilities_is_refused(
    backbone: Backbone, smollm2_path: str, port: int
) -> None:
    with (
        serving(smollm2_path, port) as url,
        pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"),
    ):
        VLLMGenerator(backbone, GenerationConfig("vllm_server", server=url)).generate(
            [Request((40, 41, 42), Sampling(max_new_tokens=4))]
        )
