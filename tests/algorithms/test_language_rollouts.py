"""NLRL and Self-Distillation: what their rollouts are turned into, on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nlac_lightning.actors import OracleActor
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.algorithms.nlrl import NLRL
from nlac_lightning.algorithms.self_distillation import SelfDistillation
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.callbacks import RolloutCallback
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Request, Sampling
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import RoleConfig, RolesConfig
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits

ENV = HelpDeskEnv(level=0, n_train=4)
# A random model never ends a line; nearly each of its tokens holds one of these letters.
ENDS = Sampling(temperature=1.0, max_new_tokens=12, stop=("e", "a", "i", "o"))
ROLES = ("policy", "successor", "backup", "evaluator", "refinement")
LIMITS = RolloutLimits(max_turns=8)


def build(cls: type[NLAC], path: str, **options: Any) -> Any:
    settings: dict[str, Any] = {role: RoleConfig(sampling=ENDS) for role in ROLES}
    settings["backup"] = RoleConfig(adapter="target", sampling=ENDS)
    return cls(
        roles=RolesConfig(templates="help_desk_small", format="plain", action="plain", **settings),
        backbone=BackboneConfig(path, lora_r=2, dtype="float32"),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0),
        limits=LIMITS,
        **options,
    )


Call = list[tuple[Request, Completion]]


def outside(module: Any) -> tuple[list[Transition], list[Call]]:
    """The module without a Trainer: a solved dialogue, and the calls of its generator."""
    module.configure_model()
    module.futures.env = ENV
    torch.manual_seed(1)
    for parameter in module.backbone.adapter_parameters("online").values():
        torch.nn.init.normal_(parameter, std=0.3)
    calls: list[Call] = []
    generate = module.generator.generate

    def recorded(requests: Sequence[Request]) -> list[Completion]:
        outs = generate(requests)
        calls.append(list(zip(requests, outs, strict=True)))
        return outs

    module.generator.generate = recorded
    rollout = Rollout(ENV, module.roles, RolloutLimits())
    (episode,) = rollout.play([(ENV.tasks("train")[0], 0)], OracleActor(module.roles.codec))
    return episode.transitions(), calls


def test_nlrl_targets_sum_up_rollouts_of_the_policy(tiny_llama_path: str) -> None:
    module = build(NLRL, tiny_llama_path, rollouts=3)
    batch, calls = outside(module)
    targets = module.critic_targets(batch, 0)
    *policy, aggregation = calls
    assert module.counts["branch_episodes"] == 3 * len(batch)
    assert {r.adapter for call in policy for r, _ in call} == {"online"}
    # the policy acts first in s', after the stored action
    starts = {transition.next_state_ids for transition in batch if not transition.terminal}
    header = module.roles.codec.header()
    assert {r.ids for r, _ in policy[0]} == {start + header for start in starts}
    assert len(policy[0]) == 3 * len(starts)
    assert len(aggregation) == len(batch)
    for transition, (request, drawn), some in zip(batch, aggregation, targets, strict=True):
        assert request.adapter == "target"
        asked = module.roles.codec.decode(request.ids).rsplit("Now: ", 1)[1]
        assert all(m["content"] in asked for m in transition.turn.replies)
        ends = "happy, happy, happy." if transition.terminal else "unhappy, unhappy, unhappy."
        assert f"In the end: {ends}" in asked, "a random policy solves nothing"
        assert len(some) == drawn.complete
        for target in some:
            assert target.teacher == request.ids + drawn.ids
    examples = module.critic_examples(batch, targets)
    assert {e.teacher.adapter for e in examples} == {"target"} and examples
    for example in examples:
        target = example.ids[example.start :]
        assert example.teacher.ids[-len(target) :] == target


def test_nlrl_warms_up_on_stored_outcomes_without_rollouts(tiny_llama_path: str) -> None:
    module = build(NLRL, tiny_llama_path)
    batch, calls = outside(module)
    module.critic_targets(batch, 0, "outcome")
    assert not module.counts["branch_episodes"]
    assert [len(call) for call in calls if call] == [len(batch)], "one summary of each"


def test_self_distillation_refines_after_reading_rollouts(tiny_llama_path: str) -> None:
    module = build(SelfDistillation, tiny_llama_path, rollouts=2)
    batch, calls = outside(module)
    results = module.improver()(batch, 0)
    base, hindsight = calls[0], calls[-1]
    assert module.counts["branch_episodes"] == 2 * len(batch)
    header = module.roles.codec.header()
    for state, result, (asked, said), (request, refined) in zip(
        batch, results, base, hindsight, strict=True
    ):
        assert asked.ids == state.state_ids + header, "a fresh action"
        assert result.action == module.roles.action(said.text)
        assert request.ids[: len(state.state_ids)] == state.state_ids
        prompt = module.roles.codec.decode(request.ids[len(state.state_ids) :])
        assert f'"{result.action}"' in prompt and prompt.count("Ending: ") == 2
        expected = refined if refined.complete and refined.text.strip() else None
        assert result.target == expected
        assert result.source == "refinement"
    assert any(result.target for result in results)


def test_self_distillation_needs_no_critic(tiny_llama_path: str) -> None:
    module = build(SelfDistillation, tiny_llama_path)
    assert module.loss.critic_weight == 0 and module.gate.is_open
    for cls in (NLRL, SelfDistillation):
        with pytest.raises(ConfigError, match=r"model\.rollouts"):
            build(cls, tiny_llama_path, rollouts=0)


@pytest.mark.parametrize("cls", [NLRL, SelfDistillation])
def test_a_run_trains_the_online_adapter_and_counts_all_episodes(
    tiny_llama_path: str, tmp_path: Path, cls: type[NLAC]
) -> None:
    module = build(cls, tiny_llama_path, rollouts=2)
    logger = TensorBoardLogger(tmp_path, "logs", version=0)
    trainer = lightning.Trainer(
        max_steps=2,
        limit_val_batches=0,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[
            RolloutCallback(
                initial_episodes=2,
                episodes=1,
                initial_exploration=Exploration("epsilon", 1.0),
                limits=LIMITS,
            )
        ],
    )
    trainer.fit(module, ReplayDataModule(ENV, batch_size=3))
    assert trainer.global_step == 2 and not module.counts["skipped_steps"]
    moved = {
        adapter: any(
            bool(value.abs().max() > 0)
            for name, value in module.backbone.adapter_parameters(adapter).items()
            if "lora_B" in name
        )
        for adapter in ("online", "target")
    }
    assert moved == {"online": True, "target": False}
    events = EventAccumulator(str(tmp_path / "logs/version_0"))
    events.Reload()
    episodes = [event.value for event in events.Scalars("env/episodes")]
    # 2 before training; in each step 2 x 3 rollouts, after the first 1 episode for the buffer
    assert episodes == [2, 9, 15]
    assert ("train/critic" in events.Tags()["scalars"]) == (cls is NLRL)
    assert "train/policy" in events.Tags()["scalars"]
