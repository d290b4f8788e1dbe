"""RFT imitates successes and nothing else, through a real Trainer on the help desk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest

from nlac_lightning.actors import OracleActor
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.algorithms.rft import RFT
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

ENV = HelpDeskEnv(level=0, n_train=4)


def build(path: str, **options: Any) -> RFT:
    return RFT(
        roles=RolesConfig(templates="help_desk_small", format="plain", action="plain"),
        backbone=BackboneConfig(path, lora_r=4, dtype="float32"),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0),
        **options,
    )


def fit(module: RFT, data: ReplayDataModule, folder: Path, steps: int) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def test_learns_the_successes_of_a_buffer_and_skips_without(
    tiny_llama_path: str, tmp_path: Path
) -> None:
    module = build(tiny_llama_path)
    data = ReplayDataModule(ENV, buffer=str(tmp_path / "replay.sqlite"), batch_size=8)
    fit(module, data, tmp_path, 1)  # an empty buffer
    assert module.counts["skipped_steps"] == 1
    roles: Roles = module.roles
    rollout = Rollout(ENV, roles, RolloutLimits())
    jobs = [(task, 0) for task in ENV.tasks("train")]
    data.open_buffer().append_many(rollout.play(jobs, OracleActor(roles.codec)))
    batch = [x for e in data.buffer.iter_episodes() for x in e.transitions()]
    examples = module.examples(batch)
    assert sum(e.weight for e in examples) == pytest.approx(1)
    for example, x in zip(examples, batch, strict=True):
        assert example.ids[example.start :] == x.turn.action_ids
    trainer = fit(module, data, tmp_path, 15)
    last = float(trainer.callback_metrics["train/policy"])
    assert last < 10.5, last  # ln 49152 = 10.8 at the start; the random head stays frozen
    assert module.counts["skipped_steps"] == 1


def test_weights_and_what_is_left_out(tiny_llama_path: str) -> None:
    module = build(tiny_llama_path, normalisation="token")
    module.configure_model()
    rollout = Rollout(ENV, module.roles, RolloutLimits())
    episode = next(rollout.play([(ENV.tasks("train")[0], 0)], OracleActor(module.roles.codec)))
    cut, wrong, invalid, *rest = episode.transitions()
    lengths = [len(x.turn.action_ids) for x in rest]
    assert len(set(lengths)) > 1, "the two weightings must differ"
    batch = [
        replace(cut, turn=replace(cut.turn, finish_reason="length")),
        replace(wrong, turn=replace(wrong.turn, info={"error": "no such order"})),
        replace(invalid, turn=replace(invalid.turn, info={"valid": False})),
        *rest,
    ]
    # an example's weight multiplies the mean over its tokens
    weights = [example.weight for example in module.examples(batch)]
    assert weights == pytest.approx([length / sum(lengths) for length in lengths])
    assert module.counts == {"cut_off_dropped": 1, "errors_dropped": 2}
    module.normalisation, module.skip_errors = "turn", False
    kept = len(batch) - 1
    weights = [example.weight for example in module.examples(batch)]
    assert weights == pytest.approx([1 / kept] * kept)
