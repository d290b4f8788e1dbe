"""Rows (b), (c) and (d): rollouts and training steps, against plain ways and against TRL.

TRL's trainers are given our model, adapter included, and the same ids, so that both sides compute
the same loss; a step that does not agree in its loss stops the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from speed_common import Bench, Ids, Row, Texts, best, in_child, timed
from torch import Tensor

from nlac_lightning.algorithms.examples import Example, accumulate
from nlac_lightning.generation.base import Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.policy_gradient.surrogate import clipped_surrogate
from nlac_lightning.policy_gradient.tokens import packed_states, token_outputs
from nlac_lightning.policy_gradient.trajectory import Segment

PACK = 4096
CLIP = 0.2


def trainer_of(kind: str, bench: Bench, rows: list[dict[str, Any]], **options: Any) -> Any:
    """A TRL trainer on the bench's model."""
    import trl

    common = {
        "output_dir": str(Path(bench.folder, kind)), "report_to": [], "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, **options,
    }  # fmt: skip
    backbone = bench.backbone
    made: dict[str, Any] = {
        "model": backbone.model.get_base_model(),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": backbone.tokenizer,
    }
    if kind == "sft":
        trainer = trl.SFTTrainer(args=trl.SFTConfig(**common), **made)
    else:

        def reward(completions: list[Any], **_: Any) -> list[float]:
            return [0.0] * len(completions)

        trainer = trl.GRPOTrainer(args=trl.GRPOConfig(**common), reward_funcs=reward, **made)
    for parameter in backbone.adapter_parameters("online").values():
        parameter.requires_grad_(True)
    return trainer


def padded(rows: Sequence[Ids], left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids and mask [rows, longest]."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


def check(name: str, ours: float, theirs: float) -> None:
    """Both sides must have computed the same loss."""
    if abs(ours - theirs) > 1e-3 * max(abs(theirs), 1e-3):
        raise SystemExit(f"{name}: losses disagree, {ours} and {theirs}")


def rollout_rows(bench: Bench) -> list[Row]:
    """(b): dialogues against re-prefilling each turn, and a GRPO rollout against TRL's."""
    return [*dialogue_rows(bench), *group_rows(bench)]


def dialogue_rows(bench: Bench) -> list[Row]:
    """Eight dialogues of eight turns side by side."""
    backbone, tokens = bench.backbone, Texts()
    system, episodes, turns, answer = tokens(512), 8, 8, 16
    openings = [system + tokens(64) for _ in range(episodes)]
    replies = [[tokens(48) for _ in range(turns)] for _ in range(episodes)]
    sampling = Sampling(max_new_tokens=answer)

    def play(act: Callable[[list[Ids]], list[Ids]]) -> list[Ids]:
        states = list(openings)
        for turn in range(turns):
            actions = act(states)
            states = [s + a + r[turn] for s, a, r in zip(states, actions, replies, strict=True)]
        return states

    def ours() -> list[Ids]:
        generator = InProcessGenerator(backbone, pack_tokens=PACK, cache_tokens=100_000)

        def act(states: list[Ids]) -> list[Ids]:
            requests = [Request(state, sampling, extend=True) for state in states]
            return [out.ids for out in generator.generate(requests)]

        return play(act)

    @torch.no_grad()
    def again(states: list[Ids]) -> list[Ids]:
        ids = torch.tensor(states)
        with backbone.use("online"):
            out = backbone.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=answer, min_new_tokens=answer, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [tuple(row[ids.shape[1] :].tolist()) for row in out]

    backbone.eval()
    ours()
    mine, seconds = timed(ours)
    theirs, naive = timed(lambda: play(again))
    if mine != theirs:
        raise SystemExit("(b): the dialogues disagree")
    made = episodes * turns * answer
    text = f"{episodes} dialogues of {turns} turns, 576 + 64 tokens a turn, {answer} of them new"
    settings = bench.settings(text)
    return [
        Row("(b) rollout, re-prefill / ours", naive / seconds, "x", settings),
        Row("(b) rollout, ours", made / seconds, "tokens/s", settings),
    ]


def group_rows(bench: Bench) -> list[Row]:
    """Four prompts, eight samples each, as a GRPO rollout needs them."""
    tokens, size, answer = Texts(1), 8, 32
    system = tokens(256)
    prompts = [p for p in [system + tokens(64) for _ in range(4)] for _ in range(size)]
    trainer = trainer_of(
        "grpo", bench, [{"prompt": "x"}] * 32,
        per_device_train_batch_size=32, num_generations=size, max_completion_length=answer,
        temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    sampling = Sampling(temperature=1.0, max_new_tokens=answer)
    stop = (bench.backbone.tokenizer.eos_token_id,)

    def ours() -> int:
        generator = InProcessGenerator(bench.backbone, pack_tokens=PACK)
        requests = [Request(p, sampling, stop_ids=stop, seed=n) for n, p in enumerate(prompts)]
        return sum(len(out.ids) for out in generator.generate(requests))

    def theirs() -> int:
        with bench.backbone.use("online"):
            out, _ = trainer._generate_single_turn([list(p) for p in prompts], None, {}, size)
        return sum(map(len, out))

    ours(), theirs()
    (mine, seconds), (other, peer) = timed(ours), timed(theirs)
    settings = bench.settings("4 prompts of 256 shared + 64 tokens, 8 samples of 32 tokens each")
    return [Row("(b) GRPO rollout, ours / TRL", mine / seconds / (other / peer), "x", settings)]


def sft_rows(bench: Bench) -> list[Row]:
    """(c): with and without a prefix that the batch shares, and with nothing to leave out.

    Without a GPU TRL puts every position through the head, trained or not.
    """
    return [
        *_sft(bench, "no shared prefix", 0),
        *_sft(bench, "256 shared tokens", 256),
        *_sft(bench, "every token trained", 0, answer=None),
    ]


def _sft(bench: Bench, label: str, shared: int, answer: int | None = 32) -> list[Row]:
    backbone, tokens = bench.backbone, Texts(2)
    system = tokens(shared)
    rows = [system + tokens(64 + 32 * n + 32) for n in range(8)]
    cuts = [len(row) - answer if answer else 1 for row in rows]
    prompts = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    answers = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
    trained = sum(map(len, answers))
    examples = [
        Example("policy", row, len(p), weight=len(a) / trained)
        for row, p, a in zip(rows, prompts, answers, strict=True)
    ]
    data = [{"input_ids": list(r), "labels": list(r)} for r in rows]
    trainer = trainer_of(
        "sft", bench, data, loss_type="nll", per_device_train_batch_size=8,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    ids, mask = padded(rows)
    labels = ids.masked_fill(mask == 0, -100)
    for i, p in enumerate(prompts):
        labels[i, : len(p)] = -100

    def ours() -> float:
        backbone.train().zero_grad()
        return accumulate(backbone, examples, PACK, torch.Tensor.backward)["policy"]

    def theirs() -> float:
        backbone.train().zero_grad()
        with backbone.use("online"):
            loss = trainer.compute_loss(
                trainer.model, {"input_ids": ids, "attention_mask": mask, "labels": labels}
            )
            loss.backward()
        return float(loss.detach())

    check("(c)", ours(), theirs())
    sides = {}
    for name, step in (("ours", ours), ("TRL", theirs)):
        sides[name] = in_child(lambda step=step: best(step, 2))
    (seconds, peak), (peer, peer_peak) = sides["ours"], sides["TRL"]
    settings = bench.settings(f"8 sequences of {shared} + 96 to 320 tokens, {trained} trained")
    return [
        Row(f"(c) SFT step, {label}, TRL nll / ours", peer / seconds, "x", settings),
        Row(f"(c) memory added, {label}, ours / TRL", peak / peer_peak, "x", settings),
    ]


def policy_rows(bench: Bench) -> list[Row]:
    """(d): forward and backward of GRPO's loss on two groups of eight."""
    backbone, tokens, size = bench.backbone, Texts(3), 8
    prompts = [p for p in [tokens(256) for _ in range(2)] for _ in range(size)]
    answers = [tokens(24 + 2 * (n % size)) for n in range(len(prompts))]
    advantages = torch.randn(len(prompts), generator=torch.Generator().manual_seed(0))
    trainer = trainer_of(
        "grpo", bench, [{"prompt": "x"}] * 16,
        per_device_train_batch_size=16, num_generations=size, loss_type="bnpo", beta=0.0,
        epsilon=CLIP, temperature=1.0,
    )  # fmt: skip
    segments = [Segment(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]
    total = sum(map(len, answers))

    def ours() -> float:
        backbone.train().zero_grad()
        found = 0.0
        for pack, states in packed_states(backbone, segments, "online", PACK):
            chosen = [segments[i] for i in pack]
            new = token_outputs(backbone, chosen, states, 1.0).logprobs
            gain = torch.cat([advantages[i].expand(len(segments[i])) for i in pack])
            loss = clipped_surrogate(new, new.detach(), gain, CLIP, CLIP).sum() / total
            loss.backward()
            found += float(loss.detach())
        return found

    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(answers)
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids,
        "completion_mask": completion_mask, "advantages": advantages,
        "num_items_in_batch": torch.tensor(total),
    }  # fmt: skip

    def theirs() -> float:
        backbone.train().zero_grad()
        with backbone.use("online"):
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
        return float(loss.detach())

    trainer.current_gradient_accumulation_steps = 1
    check("(d)", ours(), theirs())
    settings = bench.settings("2 prompts of 256 tokens, 8 answers of 24 to 38 tokens each")
    return [Row("(d) GRPO loss step, TRL / ours", best(theirs, 2) / best(ours, 2), "x", settings)]
