"""Rows (a), (e) and (g): one NLAC update, against the naive way and against the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from speed_common import Bench, Ids, Row, Texts, rate, timed
from torch.nn import functional as F

from nlac_lightning.algorithms.examples import Example, Teacher, accumulate, weigh
from nlac_lightning.backbone import Backbone
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator

ROLES = (
    ("next action", "next", "online"),
    ("next description", "next", "target"),
    ("backup", "state", "target"),
    ("description", "state", "online"),
    ("critique", "state", "online"),
    ("refined action", "state", "online"),
)
"""The six texts of an update: which state each reads, and with which adapter."""
PACK = 16_384


@dataclass(frozen=True)
class Shape:
    """Tokens of one update: rules and tools, dialogue, a turn, a role's instruction, an answer."""

    system: int = 4096
    dialogue: int = 512
    turn: int = 64
    instruction: int = 32
    answer: int = 12
    batch: int = 8

    def __str__(self) -> str:
        return (
            f"{self.batch} transitions of {self.system} + {self.dialogue} tokens, turns of "
            f"{self.turn}, instructions of {self.instruction}, answers of {self.answer}"
        )


class Update:
    """Prompts of one update, and both ways to compute it."""

    def __init__(self, backbone: Backbone, shape: Shape) -> None:
        tokens = Texts()
        self.backbone, self.shape = backbone, shape
        system = tokens(shape.system)
        states = [system + tokens(shape.dialogue) for _ in range(shape.batch)]
        after = [state + tokens(shape.turn) for state in states]
        instructions = {name: tokens(shape.instruction) for name, _, _ in ROLES}
        self.prompts = {
            name: [s + instructions[name] for s in (after if place == "next" else states)]
            for name, place, _ in ROLES
        }
        last = tokens(4)
        self.prompts["policy"] = [state + last for state in states]
        self.seconds = {"generation": 0.0, "losses": 0.0}
        self.loss_tokens = self.prefilled = 0.0

    def ours(self) -> tuple[dict[str, list[Ids]], float]:
        """The texts and the loss, each distinct token once."""
        sampling = Sampling(max_new_tokens=self.shape.answer)
        generator = InProcessGenerator(self.backbone, pack_tokens=2048, cache_tokens=200_000)

        def generate() -> dict[str, list[Ids]]:
            return {
                name: [
                    out.ids
                    for out in generator.generate(
                        [Request(ids, sampling, adapter) for ids in self.prompts[name]]
                    )
                ]
                for name, _, adapter in ROLES
            }

        texts, self.seconds["generation"] = timed(generate)
        self.prefilled = generator.counts["prefilled_tokens"]
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
        examples = weigh(critic, 1.0) + weigh(policy, 1.0)
        metrics, self.seconds["losses"] = timed(
            lambda: accumulate(self.backbone, examples, PACK, torch.Tensor.backward, generator.read)
        )
        self.loss_tokens = metrics["packed_tokens"]
        return texts, metrics["critic"] + metrics["policy"]

    def naive(self) -> tuple[dict[str, list[Ids]], float]:
        """One batched ``generate`` for each role, then a padded forward pass for each loss.

        Its logits are computed at the answers only, as ours are.
        """
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
        return texts, float(critic_loss.detach() + policy_loss.detach())

    def _logits(
        self, prompt: str, text: str, texts: dict[str, list[Ids]], adapter: str
    ) -> torch.Tensor:
        rows = [p + t for p, t in zip(self.prompts[prompt], texts[text], strict=True)]
        kept = self.shape.answer + 1
        with self.backbone.use(adapter):
            logits = self.backbone.model(
                torch.tensor(rows), logits_to_keep=kept, use_cache=False
            ).logits
        return logits[:, :-1]


def update_rows(bench: Bench, shape: Shape) -> list[Row]:
    """(a): both sides must give the same texts and losses, or the program stops."""
    update = Update(bench.backbone, shape)
    (ours, our_loss), seconds = timed(update.ours)
    (naive, naive_loss), naive_seconds = timed(update.naive)
    same = np.mean([ours[name] == naive[name] for name in ours])
    if same < 1 or abs(our_loss - naive_loss) > 1e-3 * abs(naive_loss):
        raise SystemExit(f"sides disagree: {same:.0%} of texts, {our_loss} and {naive_loss}")
    settings = bench.settings(str(shape))
    read = sum(len(p) for name, _, _ in ROLES for p in update.prompts[name])
    parts = update.seconds
    return [
        Row("(a) NLAC update, naive / ours", naive_seconds / seconds, "x", settings),
        Row("(a) prompt tokens, naive / ours", read / update.prefilled, "x", settings),
        Row("(a) share of generation in ours", parts["generation"] / seconds, "", settings),
    ]


def work_of(backbone: Backbone, pairs: float, tokens: float, trained: float) -> float:
    """Floating-point operations of a critic loss with its teacher over a pack.

    Forward of the teacher, forward of the student and the gradient of its activations: 2 operations
    each for a weight and token, and 4 times the width for a query-key pair.
    """
    config = backbone.model.config
    weights = sum(
        m.weight.numel()
        for name, m in backbone._decoder.named_modules()
        if isinstance(m, torch.nn.Linear) and "lora_" not in name
    )
    head = config.vocab_size * config.hidden_size
    attention = 4 * pairs * config.hidden_size * config.num_hidden_layers
    # forward once for teacher and student, and again in the backward pass of each chunk
    return 2 * weights * 3 * tokens + 4 * attention + 2 * head * trained * 6


def share_rows(bench: Bench) -> list[Row]:
    """(e): the losses' share of what the machine does in matrix products."""
    backbone, tokens = bench.backbone, Texts()
    system = tokens(256)
    prompts = [system + tokens(96) for _ in range(8)]
    answers = [tokens(16) for _ in prompts]
    examples = weigh(
        [
            Example("critic", p + a, len(p), teacher=Teacher("target", p + a))
            for p, a in zip(prompts, answers, strict=True)
        ],
        1.0,
    )
    metrics = {}

    def step() -> None:
        backbone.zero_grad()
        metrics.update(accumulate(backbone, examples, PACK, torch.Tensor.backward))

    step()
    seconds = min(timed(step)[1] for _ in range(3))
    own = len(prompts[0]) + len(answers[0]) - len(system)
    pairs = len(system) ** 2 / 2 + len(prompts) * own * (len(system) + own / 2)
    trained = sum(map(len, answers))
    work = work_of(backbone, pairs, metrics["packed_tokens"], trained)
    settings = bench.settings("8 critic examples of 256 shared + 112 tokens, 16 of them trained")
    return [Row("(e) losses / matrix-product rate", work / seconds / rate(), "", settings)]


def growth_rows(bench: Bench) -> list[Row]:
    """(g): our update, relative to the first shape."""
    base = Shape(system=768, dialogue=128, batch=4)
    shapes = {
        "base": base,
        "system x2": replace(base, system=1536),
        "system x4": replace(base, system=3072),
        "dialogue x2": replace(base, dialogue=256),
        "dialogue x4": replace(base, dialogue=512),
        "batch x2": replace(base, batch=8),
        "batch x4": replace(base, batch=16),
    }
    Update(bench.backbone, base).ours()
    seconds = {
        name: min(timed(Update(bench.backbone, shape).ours)[1] for _ in range(2))
        for name, shape in shapes.items()
    }
    return [
        Row(f"(g) update time, {name}", value / seconds["base"], "x", bench.settings(str(shape)))
        for (name, value), shape in zip(seconds.items(), shapes.values(), strict=True)
    ]
