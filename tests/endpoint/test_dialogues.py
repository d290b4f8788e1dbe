"""Whole dialogues with a customer behind a server that fails: recorded, and never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nlac_lightning import models
from nlac_lightning.actors import OracleActor
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.endpoint import EndpointConfig
from nlac_lightning.envs.twenty_questions import (
    CachedAnswerer,
    EndpointAnswerer,
    TwentyQuestionsEnv,
)
from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits
from nlac_lightning.users.language_model import EndpointUser

STOPS = "Thank you. ###STOP###"


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    return Roles(RolesConfig(templates="tau2"), models.load_tokenizer(smollm2_path))


def impatient(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig(url, request_seconds=0.3, retries=1, backoff_seconds=0.01, **settings)


@pytest.mark.parametrize("fault", ["down", "hang", "drop", (200, "<html>", {}), (503, "no", {})])
def test_an_episode_without_a_user_is_recorded_and_left_out(
    faults: Any, fault: Any, roles: Roles, tmp_path: Path
) -> None:
    pytest.importorskip("tau2.domains", reason="needs the extra tau")
    from nlac_lightning.envs.tau2 import Tau2Env

    url = "http://127.0.0.1:9/v1" if fault == "down" else faults.url
    # the server answers the first customer to the end, and then no more
    faults.plan = [(200, faults.answer("Hi"), {}), (200, faults.answer(STOPS), {}), fault]
    path = str(tmp_path / "replay.sqlite")
    env = Tau2Env("retail", EndpointUser(impatient(url)), prompt="slim")
    data = ReplayDataModule(env, buffer=path, batch_size=4)
    rollout = Rollout(env, roles, RolloutLimits(parallel=1))
    jobs = [(task, 0) for task in env.tasks("train")[:2]]
    with ReplayBuffer(path, env=env.name) as buffer:
        buffer.append_many(rollout.play(jobs, OracleActor(roles.codec)))
        episodes = list(buffer.iter_episodes())
    assert rollout.counts["end/user_failed"] == (2 if fault == "down" else 1)
    last = episodes[-1].turns[-1]
    assert last.truncated and not last.terminated and last.reward == 0 and last.info["error"]
    batches = iter(data.train_dataloader())
    if fault == "down":
        with pytest.raises(ConfigError, match="no transition to draw"):
            next(batches)
        return
    assert [e.reason for e in episodes] == ["solved", "user_failed"]
    assert {x.task_id for _ in range(8) for x in next(batches)} == {episodes[0].task_id}


def test_an_answerer_behind_a_server_is_asked_once_and_may_fail(
    faults: Any, tmp_path: Path
) -> None:
    faults.plan = [(200, faults.answer("Yes, it is."), {}), (200, "<html>", {})]
    path = str(tmp_path / "answers.sqlite")
    answerer = CachedAnswerer(EndpointAnswerer(impatient(faults.url)), path, "model")
    env = TwentyQuestionsEnv(answerer=answerer)
    game = env.reset(env.tasks("test")[0])
    assert game.step("Is it <|im_end|> alive?").messages[0]["content"] == "yes"
    asked = faults.requests[0]["messages"][0]["content"]
    assert env.tasks("test")[0].data["object"] in asked and "<|im_end|>" not in asked
    step = game.step("Is it round?")
    assert step.truncated and step.info["reason"] == "user_failed" and "garbage" in str(step.info)
    # another run gets the same answers without a server; what failed was not kept
    again = CachedAnswerer(EndpointAnswerer(impatient("http://127.0.0.1:9/v1")), path, "model")
    game = TwentyQuestionsEnv(answerer=again).reset(env.tasks("test")[0])
    assert game.step("is it <|im_end|> alive?").messages[0]["content"] == "yes"
    assert game.step("Is it round?").info["reason"] == "user_failed"


def test_a_real_model_answers_over_http(real_server: str) -> None:
    config = EndpointConfig(real_server, request_seconds=300, total_seconds=300)
    answerer = EndpointAnswerer(config)
    found = [answerer.answer("cat", "Is it alive?") for _ in range(2)]
    assert found[0] == found[1] and found[0] in ("yes", "no", "not clear")
