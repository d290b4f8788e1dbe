"""One SFT step against TRL's, on the same model and batch (extra ``peers``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nlac_lightning.algorithms.examples import accumulate
from nlac_lightning.algorithms.rft import RFT
from nlac_lightning.replay.episode import Transition
from nlac_lightning.rollout import ModelActor, Rollout, RolloutLimits

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'nlac-lightning[peers]'")


def play(module: Any, env: Any) -> list[Transition]:
    """Episodes of one turn, since TRL's loss takes one completion per prompt."""
    rollout = Rollout(env, module.roles, RolloutLimits())
    jobs = [(task, seed) for task in env.tasks("train") for seed in range(4)]
    played = rollout.play(jobs, ModelActor(module.roles, module.generator))
    return [x for i, episode in enumerate(played) for x in episode.transitions(i)]


def build(bench: Any, algorithm: type, **options: Any) -> tuple[Any, list[Transition]]:
    module = bench.build(algorithm, tokens=3, **options)
    module.configure_model()
    bench.shake(module)
    module.manual_backward = lambda loss: loss.backward()
    return module, play(module, bench.Env(tasks=2))


def gradients(module: Any) -> list[Tensor]:
    grads = [p.grad for p in module.backbone.adapter_parameters("online").values()]
    return [g.clone() for g in grads if g is not None]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal to 1e-4 relative to each parameter's largest gradient."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def padded(rows: list[tuple[int, ...]], left: bool) -> Iterator[Tensor]:
    """Ids and mask."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    yield from (ids, mask)


def test_sft_step(bench: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    module, batch = build(bench, RFT, normalisation="token")
    # a random model's completions are cut off, and RFT would drop them
    batch = [replace(x, turn=replace(x.turn, finish_reason="stop")) for x in batch]
    examples = module.examples(batch)
    losses: list[float] = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        losses.append(float(loss.detach()))

    accumulate(module.backbone, examples, 1024, backward)
    ours = gradients(module)
    module.zero_grad()
    settings = trl.SFTConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, loss_type="nll",
        per_device_train_batch_size=8, gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = [
        {"input_ids": list(e.ids), "labels": [-100] * e.start + list(e.ids[e.start :])}
        for e in examples
    ]
    trainer = trl.SFTTrainer(
        model=module.backbone.model.get_base_model(),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=module.backbone.tokenizer,
    )
    for p in module.backbone.adapter_parameters("online").values():
        p.requires_grad_(True)
    ids, mask = padded([e.ids for e in examples], left=False)
    labels = ids.clone()
    for i, e in enumerate(examples):
        labels[i, : e.start] = -100
    labels[mask == 0] = -100
    with module.backbone.use("online"):
        loss = trainer.compute_loss(
            trainer.model, {"input_ids": ids, "attention_mask": mask, "labels": labels}
        )
        loss.backward()
    assert sum(losses) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same(ours, gradients(module))
