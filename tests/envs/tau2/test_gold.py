"""An oracle and a silent policy through rollout, parser, environment, reward and buffer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning.actors import Live, OracleActor
from nlac_lightning.envs.tau2.recorded import RecordedUser
from nlac_lightning.generation.base import Completion
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import Roles
from nlac_lightning.rollout import Rollout, RolloutLimits
from nlac_lightning.users.scripted import ScriptedUser

NOTHING_TO_DO = {
    "retail": "10 12 25 50 57 65 105",
    "airline": "0 1 4 5 6 10 13 26 28 31 34 36 41 43 45 46 47 48 49",
}
"""Measured with tau2's own evaluator on dialogues without any tool call."""


class Silent:
    """Only ever says that it is sorry."""

    version = 0

    def __init__(self, roles: Roles) -> None:
        self.roles = roles

    def act(self, states: Sequence[Live]) -> list[Completion]:
        return [self.roles.completion("I am sorry.", "They want a lot.") for _ in states]


def all_tasks(env: Any) -> list[Any]:
    return [*env.tasks("train"), *env.tasks("test")]


def play(env: Any, roles: Roles, actor: Any, path: Path, max_turns: int = 60) -> ReplayBuffer:
    rollout = Rollout(env, roles, RolloutLimits(max_turns=max_turns, max_tokens=10**6))
    buffer = ReplayBuffer(path / "replay.sqlite", env=env.name)
    env.meet(roles.codec.chat_template)
    buffer.append_many(rollout.play([(task, 0) for task in all_tasks(env)], actor))
    assert buffer.problems() == []
    return buffer


def test_the_oracle_earns_every_task_and_tau2_agrees(
    env: Any, roles: Roles, tau2_reward: Any, tmp_path: Path
) -> None:
    untouched = env.domain.environment().get_db_hash()
    buffer = play(env, roles, OracleActor(roles.codec), tmp_path)
    episodes = list(buffer.iter_episodes())
    assert len(episodes) == {"tau2/retail": 114, "tau2/airline": 50}[env.name]
    for episode in episodes:
        assert episode.total_reward == 1.0, episode.task_id
        assert all(turn.info["valid"] for turn in episode.turns)
        assert episode.turns[-1].terminated and episode.reason == "solved"
        assert tau2_reward(env.sessions[episode.task_id]) == 1.0, episode.task_id
    assert env.domain.environment().get_db_hash() == untouched


def test_a_silent_policy_earns_exactly_the_tasks_without_anything_to_do(
    env: Any, roles: Roles, tmp_path: Path
) -> None:
    episodes = list(play(env, roles, Silent(roles), tmp_path).iter_episodes())
    earned = {episode.task_id for episode in episodes if episode.total_reward > 0}
    masked = {t.id for t in all_tasks(env) if "do_nothing" in env.facts(t)["masks"]}
    assert earned == masked == set(NOTHING_TO_DO[env.domain.name].split())
    assert {episode.reason for episode in episodes} == {"solved", "wrong_outcome"}


def test_the_scripted_user_waits_for_all_gold_actions_and_then_leaves(env: Any) -> None:
    """Neither a stop before the last write nor a dialogue without an end, on any task."""
    env.user = ScriptedUser()
    for task in all_tasks(env):
        session = env.reset(task)
        for _ in range(40):
            step = session.step(session.oracle_action() or "")
            if step.terminated or step.truncated:
                break
        assert (step.reward, step.info["reason"]) == (1.0, "solved"), task.id


def test_silence_earns_nothing_unless_the_user_ends_the_dialogue(
    airline: Any, roles: Roles, tmp_path: Path
) -> None:
    airline.user = RecordedUser(["Hello."] * 9)
    episodes = list(play(airline, roles, Silent(roles), tmp_path, max_turns=2).iter_episodes())
    assert len(episodes) == 50 and {episode.total_reward for episode in episodes} == {0.0}
    assert {episode.reason for episode in episodes} == {"step_limit"}
    assert all(e.turns[-1].truncated and not e.turns[-1].terminated for e in episodes)


@pytest.mark.parametrize("spoilt", ["order", "message", "extra"])
def test_the_reward_and_tau2_agree_on_spoilt_episodes(
    retail: Any, tau2_reward: Any, spoilt: str
) -> None:
    """Gold dialogues with one thing wrong: a call left out, a fact not told, a change too many."""
    found = 0
    for task in list(all_tasks(retail))[::12]:
        session = retail.reset(task)
        calls = [call.text("json") for call in session.task.gold]
        if spoilt == "order":
            calls = calls[:-1]
        if spoilt == "extra":
            calls += ['modify_user_address(user_id="yusuf_rossi_9620", address1="x", address2="", '
                      'city="y", state="z", country="USA", zip="1")']  # fmt: skip
        for call in calls:
            session.step(call)
        facts = "" if spoilt == "message" else " ".join(session.task.communicate)
        step = session.step(f"Done. {facts}")
        assert step.terminated
        assert step.reward == tau2_reward(session), task.id
        found += step.reward == 0
    assert found
