"""Speed as ratios, each measured in one run: ``python benchmarks/speed.py [--json FILE]``.

Rows: (a) one NLAC update against the naive way with the same model, (e) share of the machine's
matrix-product rate that the losses reach, (f) replay by size, (g) growth of the update with state
length and batch. The default model is a random Llama of 6 million parameters, so that the naive
side ends on one core; ``--model NAME`` takes a real one. Both sides must give the same tokens and
losses, or the program stops.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nlac_lightning.algorithms.examples import Example, Teacher, accumulate, weigh
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.models import SMOLLM2, load_tokenizer
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.replay.sampler import TransitionSampler

ROLES = (
    ("next action", "next", "online"),
    ("next description", "next", "target"),
    ("backup", "state", "target"),
    ("description", "state", "online"),
    ("critique", "state", "online"),
    ("refined action", "state", "online"),
)
"""The six texts of an update: which state each reads, and with which adapter."""


@dataclass(frozen=True)
class Shape:
    """Tokens of one update: rules and tools, dialogue, a turn, a role's instruction, an answer."""

    system: int = 1536
    dialogue: int = 256
    turn: int = 64
    instruction: int = 32
    answer: int = 12
    batch: int = 8


@dataclass
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    settings: str


class Update:
    """Prompts of one update, and both ways to compute it."""

    def __init__(self, backbone: Backbone, shape: Shape) -> None:
        rng = np.random.default_rng(0)

        def tokens(n: int) -> tuple[int, ...]:
            return tuple(int(i) for i in rng.integers(100, 40_000, n))

        self.backbone, self.shape = backbone, shape
        system = tokens(shape.system)
        states = [system + tokens(shape.dialogue) for _ in range(shape.batch)]
        after = [state + tokens(shape.turn) for state in states]
        instructions = {name: tokens(shape.instruction) for name, _, _ in ROLES}
        instructions["policy"] = tokens(4)
        self.prompts = {
            name: [s + instructions[name] for s in (after if place == "next" else states)]
            for name, place, _ in ROLES
        }
        self.prompts["policy"] = [state + instructions["policy"] for state in states]
        self.loss_tokens = 0.0

    def ours(self) -> tuple[dict[str, list[tuple[int, ...]]], float]:
        """The texts and the loss, each distinct token once."""
        sampling = Sampling(max_new_tokens=self.shape.answer)
        generator = InProcessGenerator(self.backbone, pack_tokens=2048, cache_tokens=100_000)
        texts = {
            name: [
                out.ids
                for out in generator.generate(
                    [Request(ids, sampling, adapter) for ids in self.prompts[name]]
                )
            ]
            for name, _, adapter in ROLES
        }
        critic = [
            Example("critic", d + t, len(d), teacher=Teacher("target", b + t))
            for d, b, t in zip(
                self.prompts["description"], self.prompts["backup"], texts["backup"], strict=True
            )
        ]
        policy = [
            Example("policy", p + t, len(p))
            for p, t in zip(self.prompts["policy"], texts["refined action"], strict=True)
        ]
        self.backbone.zero_grad()
        began = time.perf_counter()
        metrics = accumulate(
            self.backbone, weigh(critic, 1.0) + weigh(policy, 1.0), 2048, torch.Tensor.backward
        )
        self.loss_seconds = time.perf_counter() - began
        self.loss_tokens = metrics["packed_tokens"]
        return texts, metrics["critic"] + metrics["policy"]

    def naive(self) -> tuple[dict[str, list[tuple[int, ...]]], float]:
        """One batched ``generate`` for each role, then a padded forward pass for each loss."""
        model, texts = self.backbone.model, {}
        model.eval()
        for name, _, adapter in ROLES:
            ids = torch.tensor(self.prompts[name])  # of one length, so this is free of padding
            with self.backbone.use(adapter), torch.no_grad():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=self.shape.answer,
                    min_new_tokens=self.shape.answer,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            texts[name] = [tuple(row[ids.shape[1] :].tolist()) for row in out]
        self.backbone.zero_grad()
        with torch.no_grad():
            teacher = self._logits("backup", "backup", texts, "target")
        student = self._logits("description", "backup", texts, "online")
        critic = F.kl_div(
            student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
        )
        critic_loss = critic.sum(-1).mean()
        critic_loss.backward()
        logits = self._logits("policy", "refined action", texts, "online")
        answers = torch.tensor(texts["refined action"])
        policy_loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        policy_loss.backward()
        return texts, float(critic_loss + policy_loss)

    def _logits(
        self, prompt: str, text: str, texts: dict[str, list[tuple[int, ...]]], adapter: str
    ) -> torch.Tensor:
        rows = [p + t for p, t in zip(self.prompts[prompt], texts[text], strict=True)]
        with self.backbone.use(adapter):
            logits = self.backbone.model(torch.tensor(rows)).logits
        return logits[:, -self.shape.answer - 1 : -1]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds."""
    began = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began


def update_rows(backbone: Backbone, shape: Shape, model: str) -> list[Row]:
    """(a) and (e)."""
    update = Update(backbone, shape)
    update.ours()  # warm
    (ours, our_loss), seconds = timed(update.ours)
    (naive, naive_loss), naive_seconds = timed(update.naive)
    same = np.mean([ours[name] == naive[name] for name in ours])
    if same < 1 or abs(our_loss - naive_loss) > 1e-3 * abs(naive_loss):
        raise SystemExit(f"sides disagree: {same:.0%} of texts, {our_loss} and {naive_loss}")
    layers = sum(
        m.weight.numel()
        for n, m in backbone._decoder.named_modules()
        if isinstance(m, torch.nn.Linear) and "lora_" not in n
    )
    # teacher forward 2, student forward 2, backward to the activations 2, for each weight and token
    work = 2 * layers * (3 * update.loss_tokens)
    settings = f"{model}, {shape}, {torch.get_num_threads()} threads, float32"
    return [
        Row("(a) NLAC update, naive / ours", naive_seconds / seconds, "x", settings),
        Row("(a) seconds ours", seconds, "s", settings),
        Row("(e) losses / matrix-product rate", work / update.loss_seconds / rate(), "", settings),
    ]


def rate() -> float:
    """Floating-point operations a second of a large matrix product in float32."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return max(2 * 1024**3 / timed(lambda: a @ b)[1] for _ in range(5))


def growth_rows(backbone: Backbone, model: str) -> list[Row]:
    """(g): our update, relative to the first shape."""
    base = Shape(system=768, dialogue=128, batch=4)
    shapes = {
        "base": base,
        "system x2": Shape(system=1536, dialogue=128, batch=4),
        "dialogue x2": Shape(system=768, dialogue=256, batch=4),
        "batch x2": Shape(system=768, dialogue=128, batch=8),
    }
    Update(backbone, base).ours()
    seconds = {name: timed(Update(backbone, shape).ours)[1] for name, shape in shapes.items()}
    return [
        Row(f"(g) update time, {name}", value / seconds["base"], "x", f"{model}, {shapes[name]}")
        for name, value in seconds.items()
    ]


def replay_rows(sizes: list[int]) -> list[Row]:
    """(f): ten transitions an episode, of 100 tokens each after 1,000 of opening."""
    turn = Turn(
        action="act", completion="act", delta_ids=tuple(range(100)), action_start=10,
        action_end=30, logprobs=(-0.5,) * 20, finish_reason="stop", policy_version=0,
        explored=False, replies=[{"role": "user", "content": "go on"}], reward=0.0,
        terminated=False, truncated=False, info={},
    )  # fmt: skip
    episode = Episode(
        env="speed", task_id="0", split="train", seed=0, codec="speed",
        opening=[{"role": "user", "content": "hello"}], opening_ids=tuple(range(1000)),
        turns=[turn] * 10, reason="done",
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            with ReplayBuffer(Path(folder, f"{size}.sqlite"), capacity=size) as buffer:
                began = time.perf_counter()
                for _ in range(size // 1000):
                    buffer.append_many([episode] * 100)
                filled = time.perf_counter() - began
                sampler = TransitionSampler(buffer, batch_size=32)
                sampler.draw(0)
                began = time.perf_counter()
                for position in range(1, 21):
                    buffer.transitions(sampler.draw(position))
                drawn = time.perf_counter() - began
            settings = "10 turns an episode, batches of 32"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            rows += [
                Row(f"(f) inserts at {size:,}", size / filled, "transitions/s", settings),
                Row(f"(f) samples at {size:,}", 20 * 32 / drawn, "transitions/s", settings),
                Row(f"(f) peak memory at {size:,}", peak, "MiB", settings),
            ]
    return rows


def random_llama(folder: Path) -> str:
    """A random model of 6 million parameters beside its embeddings, in float32."""
    tokenizer = load_tokenizer(SMOLLM2)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a random Llama of 6 million parameters")
    parser.add_argument("--system", type=int, default=Shape.system, help="tokens of rules, tools")
    parser.add_argument("--dialogue", type=int, default=Shape.dialogue, help="tokens of dialogue")
    parser.add_argument("--replay", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=["a", "f", "g"], default=["f", "a", "g"])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    if "f" in options.only:
        rows += replay_rows(options.replay)  # first: peak memory would otherwise be the model's
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or random_llama(Path(folder))
        label = options.model or "random Llama, 6M"
        if {"a", "g"} & set(options.only):
            backbone = Backbone(BackboneConfig(name, dtype="float32"))
            torch.manual_seed(1)
            for adapter in ("online", "target"):
                for parameter in backbone.adapter_parameters(adapter).values():
                    torch.nn.init.normal_(parameter, std=0.05)
        if "a" in options.only:
            shape = Shape(system=options.system, dialogue=options.dialogue)
            rows += update_rows(backbone, shape, label)
        if "g" in options.only:
            rows += growth_rows(backbone, label)
    for row in rows:
        print(f"{row.name:<36}{row.value:>14,.2f} {row.unit:<14} {row.settings}")
    if options.json:
        options.json.write_text(json.dumps({"rows": [vars(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
