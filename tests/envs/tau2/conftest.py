"""tau2's domains, loaded once; tests that need them are skipped where the extra is missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning import models
from nlac_lightning.envs.tau2 import Tau2Env, package
from nlac_lightning.envs.tau2.recorded import RecordedUser
from nlac_lightning.envs.tau2.session import Tau2Session
from nlac_lightning.errors import ConfigError
from nlac_lightning.roles.roles import Roles, RolesConfig

RUNS = "shared/data/tau_bench_airline_gpt4o.json.gz"
EVERY = 1 if os.environ.get("NLAC_ALL_RUNS") else 16
"""tau2's evaluators hash whole databases, a tenth to a third of a second a run: all tasks and every
sixteenth recorded run are compared with them, all runs when NLAC_ALL_RUNS is set."""
BRIEF = ("Hello, I need help.", "Thank you. ###STOP###")
"""What a user says who leaves after the first message of the agent."""


class Watched(Tau2Env):
    """Keeps the sessions that it starts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sessions: dict[str, Tau2Session] = {}

    def reset(self, task: Any, seed: int = 0) -> Tau2Session:
        self.sessions[task.id] = super().reset(task, seed)
        return self.sessions[task.id]


@pytest.fixture(scope="session", autouse=True)
def tau2() -> None:
    """Skip everything here without the package."""
    try:
        package.check()
    except ConfigError as error:
        pytest.skip(f"needs the extra tau: {error}")


@pytest.fixture(params=["retail", "airline"])
def env(request: pytest.FixtureRequest) -> Watched:
    """Either domain, with a user who leaves after one message."""
    return Watched(request.param, user=RecordedUser(BRIEF), prompt="slim")


@pytest.fixture
def retail() -> Watched:
    return Watched("retail", user=RecordedUser(BRIEF), prompt="slim")


@pytest.fixture
def airline() -> Watched:
    return Watched("airline", user=RecordedUser(BRIEF), prompt="slim")


@pytest.fixture(scope="session")
def roles(smollm2_path: str) -> Roles:
    """ReAct roles on the real tokenizer."""
    return Roles(RolesConfig(templates="tau2"), models.load_tokenizer(smollm2_path))


@pytest.fixture(scope="session")
def runs_file() -> Path:
    """The recorded runs; skipped where they are not at hand."""
    found = [path / RUNS for path in Path(__file__).parents if (path / RUNS).is_file()]
    if not found:
        pytest.skip(f"needs the recorded runs: ../{RUNS}")
    return found[0]


@pytest.fixture(scope="session")
def tau2_reward() -> Callable[[Tau2Session], float]:
    """What tau2's own evaluators say about a session that the user ended."""
    from tau2.data_model.tasks import Action, EvaluationCriteria, Task
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
    from tau2.evaluator.evaluator_env import EnvironmentEvaluator

    def reward(session: Tau2Session) -> float:
        gold = [
            Action(action_id=str(i), name=call.name, arguments=call.arguments)
            for i, call in enumerate(session.task.gold)
        ]
        facts = list(session.task.communicate)
        criteria = EvaluationCriteria(actions=gold, communicate_info=facts)
        task = Task(id="x", user_scenario={"instructions": "-"}, evaluation_criteria=criteria)
        said, world = session.trajectory(), session.domain.environment
        return float(
            EnvironmentEvaluator.calculate_reward(world, task, said).reward
            * CommunicateEvaluator.calculate_reward(task, said).reward
        )

    return reward


@pytest.fixture(scope="session")
def every() -> int:
    """Which recorded runs are compared with tau2's own evaluators: every so many."""
    return EVERY
