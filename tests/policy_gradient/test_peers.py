"""One GRPO and one SFT step against TRL's, on the same model and batch (extra ``peers``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.examples import accumulate
from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.rft import RFT
from nlac_lightning.policy_gradient.on_policy import KLConfig
from nlac_lightning.policy_gradient.trajectory import Trajectory, make_trajectories
from nlac_lightning.replay.episode import Transition
from nlac_lightning.rollout import Rollout, RolloutLimits

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[peers]'")

GROUP = 4
"""Episodes of a task."""


def build(
    bench: Any, algorithm: type, turns: int = 1, **options: Any
) -> tuple[Any, list[Transition]]:
    """A module outside a Trainer whose adapter differs from the base, and its own episodes."""
    # a policy prompt without an instruction, so that an episode is one sequence, as in TRL
    module = bench.build(algorithm, tokens=3, templates="help_desk_small", **options)
    module.configure_model()
    bench.shake(module, std=0.05)  # so that float32 is exact enough for 1e-4
    module.manual_backward = lambda loss: loss.backward()
    env = bench.Env(tasks=2, turns=turns)
    rollout = Rollout(env, module.roles, RolloutLimits())
    jobs = [(task, seed) for task in env.tasks("train") for seed in range(GROUP)]
    played = rollout.play(jobs, ModelActor(module.roles, module.generator))
    return module, [x for i, episode in enumerate(played) for x in episode.transitions(i)]


def gradients(module: Any) -> list[Tensor]:
    grads = [p.grad for p in module.backbone.adapter_parameters("online").values()]
    return [g.clone() for g in grads if g is not None]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal to 1e-4 relative to each parameter's largest gradient."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def trl_trainer(trainer: type, module: Any, settings: Any, **options: Any) -> Any:
    """A trainer of TRL on the very same weights."""
    made = trainer(
        model=module.backbone.model.get_base_model(),
        args=settings,
        processing_class=module.backbone.tokenizer,
        **options,
    )
    for p in module.backbone.adapter_parameters("online").values():
        p.requires_grad_(True)
    made.model.train()
    return made


class Episodes:
    """Whole episodes in the form of TRL's ``rollout_func``: one completion each, with a mask.

    A completion is all that follows the first prompt; ``env_mask`` is 1 where the agent drew.
    """

    def __init__(self, trajectories: Sequence[Trajectory], masked: bool) -> None:
        self.trajectories = trajectories
        first = [t.segments[0] for t in trajectories]
        whole = [t.segments[-1].ids for t in trajectories]
        self.prompts = [list(s.ids[: s.start]) for s in first]
        self.completions = [list(i[s.start :]) for i, s in zip(whole, first, strict=True)]
        self.drawn = [
            np.concatenate([np.arange(s.start, len(s.ids)) for s in t.segments])
            - t.segments[0].start
            for t in trajectories
        ]
        self.masks = [[0] * len(c) for c in self.completions]
        for t, mask, drawn in zip(trajectories, self.masks, self.drawn, strict=True):
            for i in drawn:
                mask[i] = int(not (masked and t.truncated))

    def roll_out(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """``rollout_func``"""
        return {
            "prompt_ids": self.prompts,
            "completion_ids": self.completions,
            "logprobs": [[0.0] * len(c) for c in self.completions],  # only used with vLLM
            "env_mask": self.masks,
        }

    def rewards(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """``reward_funcs``"""
        return [t.total_reward for t in self.trajectories]

    def old_logprobs(self) -> Tensor:
        """[episodes, longest completion], 0 where nothing was drawn."""
        old = torch.zeros(len(self.completions), max(map(len, self.completions)))
        for row, t, drawn in zip(old, self.trajectories, self.drawn, strict=True):
            row[drawn] = torch.from_numpy(t.logprobs).float()
        return old


@pytest.mark.parametrize(
    ("kind", "truncated", "corrected"),
    [
        ("grpo", "keep", False),
        ("grpo", "mask", True),
        ("dr_grpo", "keep", True),
        ("bnpo", "mask", False),
        ("dapo", "keep", True),
    ],
)
def test_grpo_step(bench: Any, tmp_path: Path, kind: str, truncated: str, corrected: bool) -> None:
    """Advantages, reference, ratios, clipping, KL and normalisation over multi-turn episodes.

    The one choice that differs is a default: TRL multiplies the KL term by the ratio
    (``use_bias_correction_kl``), the paper's loss and ours do not. Both have both.
    """
    from datasets import Dataset

    longest = 3 * 3
    module, batch = build(
        bench,
        GRPO,
        turns=3,
        normalisation={"grpo": "sequence", "dr_grpo": "constant"}.get(kind, "token"),
        max_tokens=longest if kind == "dr_grpo" else None,
        scale="none" if kind == "dr_grpo" else "std",
        clip=0.2,
        clip_high=0.28,
        kl=KLConfig(0.1, corrected=corrected),
        truncated=truncated,
    )
    rng = np.random.default_rng(0)  # ratios away from 1
    played = make_trajectories(batch, module.roles)
    episodes = [
        replace(t, logprobs=t.logprobs + rng.normal(0, 0.2, len(t)), truncated=i % 3 == 0)
        for i, t in enumerate(played)
    ]
    module._read_rollout(episodes)
    metrics = module.accumulate(episodes, module.targets(episodes))
    assert 0 < metrics["clipped"] < 1 and metrics["kl"] > 1e-3
    ours = gradients(module)
    module.zero_grad()

    theirs = Episodes(episodes, truncated == "mask")
    trainer = trl_trainer(
        trl.GRPOTrainer,
        module,
        trl.GRPOConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, per_device_train_batch_size=len(episodes),
            num_generations=GROUP, loss_type=kind, temperature=1.25, max_completion_length=longest,
            beta=0.1, use_bias_correction_kl=corrected, epsilon=0.2, epsilon_high=0.28,
            scale_rewards="none" if kind == "dr_grpo" else "group",
        ),
        reward_funcs=theirs.rewards,
        rollout_func=theirs.roll_out,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(episodes)}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    with module.backbone.use("online"):
        inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * len(episodes))
        loss = trainer._compute_loss(
            trainer.model, inputs | {"old_per_token_logps": theirs.old_logprobs()}
        )
        loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same(ours, gradients(module))


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
    trainer = trl_trainer(
        trl.SFTTrainer,
        module,
        trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, loss_type="nll",
            per_device_train_batch_size=len(examples), gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list(
            [
                {"input_ids": list(e.ids), "labels": [-100] * e.start + list(e.ids[e.start :])}
                for e in examples
            ]
        ),
    )  # fmt: skip
    with module.backbone.use("online"):
        loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
        loss.backward()
    assert sum(losses) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same(ours, gradients(module))
