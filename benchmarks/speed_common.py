"""What the rows of ``speed.py`` share: the model, the clock, and processes to measure memory in."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.models import SMOLLM2, load_tokenizer

Ids = tuple[int, ...]


@dataclass
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    settings: str


@dataclass(frozen=True)
class Bench:
    """What is measured on.

    Attributes:
        backbone: adapters that differ from the base, all in float32.
        model: its name in the table.
        folder: for files of a run.
    """

    backbone: Backbone
    model: str
    folder: Path

    def settings(self, text: str) -> str:
        """Settings of a row."""
        return f"{self.model}, {text}, {torch.get_num_threads()} threads, float32"


def random_llama(folder: Path) -> str:
    """Two random layers of Qwen2.5-0.5B's shape, in float32.

    Real widths, since they decide what attention costs beside the weights' products: in a narrow
    model of few parameters a long prompt is nearly all attention.
    """
    tokenizer = load_tokenizer(SMOLLM2)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=896, intermediate_size=4864, num_hidden_layers=2,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=16_384,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return str(folder / "llama")


def make_bench(model: str | None, folder: Path) -> Bench:
    """The model of all rows, with adapters of random weights."""
    backbone = Backbone(BackboneConfig(model or random_llama(folder), dtype="float32"))
    torch.manual_seed(1)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            torch.nn.init.normal_(parameter, std=0.05)
    return Bench(backbone, model or "2 layers of Qwen2.5-0.5B's shape", folder)


class Texts:
    """Random ids."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, n: int) -> Ids:
        return tuple(int(i) for i in self.rng.integers(100, 40_000, n))


def clock() -> float:
    """Seconds; with one thread those of the processor, which other programs do not lengthen."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds."""
    began = clock()
    result = function()
    return result, clock() - began


def best(function: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    function()
    return min(timed(function)[1] for _ in range(times))


def rate() -> float:
    """Floating-point operations a second of a large matrix product in float32."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return max(2 * 1024**3 / timed(lambda: a @ b)[1] for _ in range(5))


def in_child(function: Callable[[], Any]) -> tuple[Any, float]:
    """Run in a process of its own; returns the result (JSON) and the memory it added, in MiB."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = function()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            with os.fdopen(writer, "w") as pipe:
                json.dump([answer, peak / 2**10], pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result, peak = json.loads(text)
    return result, peak
