"""Parts that hang, raise or die: bounded time, one record each, and an end when most fail."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nlac_lightning import models
from nlac_lightning.actors import Live
from nlac_lightning.envs.base import Session, Step, Task, TextEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.failures import FailureWatch, TooManyFailures
from nlac_lightning.generation.base import Completion, EngineError
from nlac_lightning.replay import Episode, ReplayBuffer, Turn
from nlac_lightning.replay.episode import FAILURES
from nlac_lightning.replay.sampler import TransitionSampler
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

SAYS: list[Any] = [{"role": "user", "content": "go on"}]


def fail() -> Any:
    raise RuntimeError("database is down")


def hang() -> Any:
    time.sleep(3600)


STEPS = {
    "hangs": hang,
    "raises": fail,
    "nan": lambda: Step(SAYS, math.nan),
    "none": lambda: None,
    "reward text": lambda: Step(SAYS, "1"),  # type: ignore[arg-type]
    "reward missing": lambda: Step(SAYS, None),  # type: ignore[arg-type]
    "message number": lambda: Step([{"role": "user", "content": 7}]),  # type: ignore[typeddict-item]
    "message empty": lambda: Step([{}]),  # type: ignore[typeddict-item]
    "messages none": lambda: Step(None),  # type: ignore[arg-type]
    "info object": lambda: Step(SAYS, info={"x": object()}),
    "info none": lambda: Step(SAYS, info=None),  # type: ignore[arg-type]
}


class Faulty(TextEnv):
    """Task ``NAME`` steps as ``STEPS[NAME]`` says; ``reset NAME`` fails at the start; else fine."""

    name = "faulty"

    def __init__(self) -> None:
        self.closed = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(name, split) for name in (*STEPS, "reset hangs", "reset raises", "fine")]

    def reset(self, task: Task, seed: int = 0) -> Session:
        if task.id.startswith("reset"):
            STEPS[task.id.removeprefix("reset ")]()
        return FaultySession(self, task.id)


class FaultySession(Session):
    opening = SAYS

    def __init__(self, env: Faulty, name: str) -> None:
        self.env, self.name = env, name

    def step(self, action: str) -> Step:
        return STEPS.get(self.name, lambda: Step(SAYS, 1.0, terminated=True))()

    def close(self) -> None:
        self.env.closed += 1


class Says:
    """An actor; the engine behind it dies in the call of that number."""

    version = 1

    def __init__(self, dies: int | None = None, error: type[Exception] = EngineError) -> None:
        self.calls, self.dies, self.error = 0, dies, error

    def act(self, states: Sequence[Live]) -> list[Completion]:
        self.calls += 1
        if self.calls == self.dies:
            raise self.error("worker 3 died")
        return [Completion((5,), "hello", (-1.0,), "stop") for _ in states]


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="plain")
    return Roles(config, models.load_tokenizer(smollm2_path))


def test_every_failing_part_costs_one_recorded_episode(roles: Roles, tmp_path: Any) -> None:
    env = Faulty()
    rollout = Rollout(env, roles, RolloutLimits(max_turns=3, call_seconds=0.3, parallel=4))
    began = time.monotonic()
    jobs = [(task, n) for n, task in enumerate(env.tasks("train"))]
    episodes = {e.task_id: e for e in rollout.play(jobs, Says())}
    assert time.monotonic() - began < 30
    assert len(episodes) == len(jobs)
    for name, episode in episodes.items():
        expected = "reset_error" if name.startswith("reset") else "env_error"
        assert episode.reason == ("done" if name == "fine" else expected), name
        assert math.isfinite(episode.total_reward)
        if name.endswith("hangs"):
            assert "TimeoutError" in episode.turns[-1].info["error"]
    assert env.closed == len(STEPS) + 1
    with ReplayBuffer(tmp_path / "replay.sqlite") as buffer:
        buffer.append_many(episodes.values())
        assert buffer.num_episodes == len(jobs) and buffer.problems() == []
        sampler = TransitionSampler(buffer, batch_size=4, exclude=FAILURES)
        drawn = {buffer.episode(i).task_id for i, _ in sampler.draw(0)}
        assert drawn == {"fine"}


@pytest.mark.parametrize("error", [EngineError, ConnectionResetError, TimeoutError])
def test_an_engine_that_dies_costs_the_episodes_that_waited(
    roles: Roles, error: type[Exception]
) -> None:
    env = Faulty()
    tasks = [Task("fine", "train")] * 6
    rollout = Rollout(env, roles, RolloutLimits(parallel=3))
    episodes = list(rollout.play([(t, n) for n, t in enumerate(tasks)], Says(1, error)))
    assert sorted(e.reason for e in episodes) == ["done"] * 3 + ["policy_failed"] * 3
    assert "worker 3 died" in episodes[0].turns[-1].info["error"]


def test_a_mistake_in_the_program_is_not_hidden(roles: Roles) -> None:
    rollout = Rollout(Faulty(), roles, RolloutLimits())
    with pytest.raises(ZeroDivisionError):
        list(rollout.play([(Task("fine", "train"), 0)], Says(1, ZeroDivisionError)))


def ended(reason: str) -> Episode:
    info = {"error": "database is down"} if reason in FAILURES else {}
    turn = Turn("a", "a", (1,), 0, 1, (), "given", 0, False, [], 0.0, False, True, info)
    return Episode("e", "t", "train", 0, "c", [], (1,), [turn], reason)


def test_a_share_of_failures_stops_the_run_with_the_reason() -> None:
    watch = FailureWatch(0.5)
    for _ in range(20):
        watch.see(ended("done"))
    for _ in range(16):  # half of the newest 32
        watch.see(ended("env_error"))
    with pytest.raises(TooManyFailures) as raised:
        watch.see(ended("reset_error"))
    for word in ("17 of the last 32", "16 env_error", "database is down", "--ckpt_path last"):
        assert word in str(raised.value)


def test_few_failures_prove_nothing_and_a_share_of_one_never_stops() -> None:
    watch, patient = FailureWatch(0.5), FailureWatch(1.0)
    for _ in range(7):
        watch.see(ended("user_failed"))
        patient.see(ended("user_failed"))
    with pytest.raises(TooManyFailures, match="8 of the last 8"):
        watch.see(ended("policy_failed"))
    for _ in range(100):
        patient.see(ended("user_failed"))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_the_share_is_checked(share: float) -> None:
    from nlac_lightning.callbacks import RolloutCallback

    with pytest.raises(ConfigError, match=r"rollout\.max_failures"):
        RolloutCallback(max_failures=share)
