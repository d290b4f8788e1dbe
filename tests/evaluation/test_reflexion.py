"""Retries with lessons: what is retried, what the next try sees, how it is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nlac_lightning import models
from nlac_lightning.actors import Live, OracleActor
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.evaluate import EvaluationConfig, Evaluator
from nlac_lightning.evaluation.reflexion import LESSONS, MAX_LESSON
from nlac_lightning.generation.base import FAILED, Completion
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import RolloutLimits


class Learner(OracleActor):
    """Solves every other task at once and the others after ``needed`` lessons."""

    def __init__(self, roles: Roles, needed: int) -> None:
        super().__init__(roles.codec)
        self.needed = needed
        self.reflected: list[list[str]] = []

    def act(self, states: Sequence[Live]) -> list[Completion]:
        right = super().act(states)
        wrong = self.codec.given("nothing")
        return [
            action if self._knows(live) else wrong
            for live, action in zip(states, right, strict=True)
        ]

    def _knows(self, live: Live) -> bool:
        _, _, lessons = live.messages[0]["content"].partition(LESSONS)
        return int(live.task.id.split("-")[-1]) % 2 == 0 or lessons.count("\n- ") >= self.needed

    def reflect(self, episodes: Sequence[Episode], instruction: str, seed: int) -> list[str]:
        self.reflected.append([episode.task_id for episode in episodes])
        return ["ask first\nthen act " + "x" * 5000 for _ in episodes]


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="plain")
    return Roles(config, models.load_tokenizer(smollm2_path))


def evaluator(roles: Roles, retries: int) -> Evaluator:
    config = EvaluationConfig(limits=RolloutLimits(max_turns=8), retries=retries)
    return Evaluator(HelpDeskEnv(level=0, n_test=6), roles, None, None, config)


def test_only_failed_tasks_are_retried_and_rows_are_cumulative(roles: Roles) -> None:
    plays = evaluator(roles, retries=3)
    tasks = plays.env.tasks("test")
    actor = Learner(roles, needed=2)
    rows = list(plays.play_with_retries(tasks, "base", actor))
    assert [label for label, _ in rows] == ["base", "base_retry1", "base_retry2", "base_retry3"]
    solved = [sum(record.success for record in records) for _, records in rows]
    assert solved == [3, 3, 6, 6]
    odd = [task.id for task in tasks if int(task.id.split("-")[-1]) % 2]
    assert actor.reflected == [odd, odd, []]
    for label, records in rows:
        assert [record.task_id for record in records] == [task.id for task in tasks]
        assert {record.policy for record in records} == {label}
    single, last = rows[0][1], rows[-1][1]
    assert not any(LESSONS in record.opening[0]["content"] for record in single)
    learned = [r.opening[0]["content"] for r in last if r.task_id in odd]
    assert all(text.count("\n- ask first then act") == 2 for text in learned)
    assert all(len(text) < 2 * MAX_LESSON + 2000 for text in learned)


def test_no_retries_and_actors_that_cannot_reflect(roles: Roles) -> None:
    plays = evaluator(roles, retries=0)
    tasks = plays.env.tasks("test")
    assert len(list(plays.play_with_retries(tasks, "base", Learner(roles, 1)))) == 1
    oracle = list(evaluator(roles, 2).play_with_retries(tasks, "oracle", OracleActor(roles.codec)))
    assert [label for label, _ in oracle] == ["oracle"]
    with pytest.raises(ConfigError, match=r"evaluation\.retries"):
        EvaluationConfig(retries=-1)


def test_a_policy_that_cannot_be_had_ends_its_episode(roles: Roles) -> None:
    class Down(OracleActor):
        def act(self, states: Sequence[Live]) -> list[Completion]:
            return [Completion((), "timeout: no answer", (), FAILED) for _ in states]

    plays = evaluator(roles, 0)
    records = plays.play(plays.env.tasks("test"), "base", "down", actor=Down(roles.codec))
    assert {record.reason for record in records} == {"policy_failed"}
    assert all(len(r.steps) == 1 and r.steps[0].completion == "" for r in records)
