"""What is longer than the model's positions: never computed, never a crash, always recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from nlac_lightning import models
from nlac_lightning.actors import ModelActor
from nlac_lightning.algorithms.examples import Example, Teacher
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.envs.base import Session, Step, Task, TextEnv
from nlac_lightning.generation.base import TOO_LONG, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

POSITIONS = 256


@pytest.fixture(scope="module")
def backbone(smollm2_path: str, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A random model with learned positions: one token more is an error in torch."""
    folder: Path = tmp_path_factory.mktemp("short_gpt2")
    tokenizer = models.load_tokenizer(smollm2_path)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=POSITIONS,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Backbone(BackboneConfig(str(folder), lora_r=2, dtype="float32"))


def ids(n: int) -> tuple[int, ...]:
    return tuple(range(100, 100 + n))


def test_an_answer_ends_where_the_positions_do(backbone: Backbone) -> None:
    assert backbone.max_positions == POSITIONS
    generator = InProcessGenerator(backbone)
    lengths = [10, POSITIONS - 5, POSITIONS - 1, POSITIONS, 10 * POSITIONS]
    asked = [Request(ids(n), Sampling(max_new_tokens=8)) for n in lengths]
    found = generator.generate(asked)
    assert [len(c.ids) for c in found] == [8, 5, 1, 0, 0]
    assert [c.finish_reason for c in found] == ["length"] * 3 + [TOO_LONG] * 2
    assert not any(c.complete for c in found) and found[-1].text == ""
    assert generator.counts["too_long"] == 2
    alone = generator.generate([Request(ids(POSITIONS - 5), Sampling(max_new_tokens=5))])
    assert alone[0].ids == found[1].ids, "a cut answer is the start of the whole one"


class Talker(TextEnv):
    """Says so many words in the opening, and in each reply."""

    name = "talker"

    def __init__(self, opening: int, reply: int) -> None:
        self.opening, self.reply = opening, reply

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(split, split)]

    def reset(self, task: Task, seed: int = 0) -> Session:
        return Talk(self.opening, self.reply)


class Talk(Session):
    def __init__(self, opening: int, reply: int) -> None:
        self.words = reply
        self.opening = [
            {"role": "system", "content": "Act."},
            {"role": "user", "content": "word " * opening},
        ]

    def step(self, action: str) -> Step:
        return Step([{"role": "user", "content": "word " * self.words}])


@pytest.mark.parametrize(("opening", "reply", "turns"), [(10, 60, 3), (10, 5000, 1), (400, 1, 1)])
def test_an_episode_ends_as_truncated(
    backbone: Backbone, opening: int, reply: int, turns: int
) -> None:
    sampling = Sampling(max_new_tokens=4)
    config = RolesConfig(action="plain", format="plain")
    config.policy.sampling = sampling
    roles = Roles(config, backbone.tokenizer)
    env = Talker(opening, reply)
    rollout = Rollout(env, roles, RolloutLimits(max_tokens=10**6))
    actor = ModelActor(roles, InProcessGenerator(backbone))
    (episode,) = rollout.play([(env.tasks("train")[0], 0)], actor)
    assert episode.reason == "token_limit" and len(episode.turns) == turns
    assert episode.turns[-1].truncated and not episode.turns[-1].terminated
    assert rollout.counts["end/token_limit"] == 1


def test_training_leaves_out_what_does_not_fit(backbone: Backbone) -> None:
    module = NLAC()
    module.backbone = backbone
    fits = Example("policy", ids(POSITIONS), 8)
    taught = Teacher("target", ids(POSITIONS + 1))
    kept = [module._trainable(e) for e in (
        fits,
        Example("policy", ids(POSITIONS + 1), 8),
        Example("critic", ids(8), 4, teacher=taught),
        Example("policy_kl", ids(8), 8),
    )]  # fmt: skip
    assert kept == [True, False, False, False]
