"""One domain of tau2: policy, tools, database, tasks and how their ends are scored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from nlac_lightning.envs.tau2 import package
from nlac_lightning.envs.tau2.actions import Call
from nlac_lightning.envs.tau2.database import Database
from nlac_lightning.envs.tau2.tasks import TauTask, from_tau2


@dataclass(frozen=True)
class Gold:
    """How a task ought to end.

    Attributes:
        fingerprint: of the database after the gold actions.
        changed: whether they change the database at all.
        writes: how many of them call a tool that writes.
        error: what a tool said against one that should write, else None.
    """

    fingerprint: str
    changed: bool
    writes: int
    error: str | None


class Domain:
    """``retail`` or ``airline``; see :func:`load_domain`.

    Attributes:
        name: the domain.
        policy: the rules for the agent, as tau2 words them.
        schemas: OpenAI schemas of its tools.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = package.load(name)
        first = self._module.get_environment()
        self.policy: str = first.get_policy()
        self.schemas: list[dict[str, Any]] = [tool.openai_schema for tool in first.get_tools()]
        self.parameters = {s["function"]["name"]: s["function"]["parameters"] for s in self.schemas}
        self.writers = {
            tool for tool in self.parameters if first.tools.tool_type(tool).value == "write"
        }
        self.database = Database(first.tools.db)
        self._untouched = self.database.fingerprint(self.database.fresh())
        self._gold: dict[str, Gold] = {}

    def environment(self, solo_mode: bool = False) -> Any:
        """A tau2 environment in its first state, made in about a millisecond."""
        return self._module.get_environment(db=self.database.fresh(), solo_mode=solo_mode)

    @cached_property
    def tasks(self) -> dict[str, TauTask]:
        """tau2's tasks by id."""
        return {task.id: from_tau2(task) for task in self._module.get_tasks(None)}

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        """Task ids of tau2's ``train`` and ``test`` split."""
        return self._module.get_tasks_split()

    def fingerprint(self, environment: Any) -> str:
        """Hash of what has become of an environment's database."""
        return self.database.fingerprint(environment.tools.db)

    def gold(self, task: TauTask) -> Gold:
        """The gold outcome; its actions are played once and the result is kept."""
        key = json.dumps([(call.name, call.arguments) for call in task.gold])
        if key not in self._gold:
            environment = self.environment()
            errors = []
            for call in task.gold:
                result = respond(environment, call)
                if result.error and call.name in self.writers:
                    errors.append(f"{call.name}: {result.content}")
            fingerprint = self.fingerprint(environment)
            self._gold[key] = Gold(
                fingerprint,
                fingerprint != self._untouched,
                sum(call.name in self.writers for call in task.gold),
                errors[0] if errors else None,
            )
        return self._gold[key]

    def masks(self, task: TauTask) -> tuple[str, ...]:
        """Which of :data:`~nlac_lightning.envs.tau2.tasks.MASKS` apply to a task."""
        gold = self.gold(task)
        found = task.known_masks()
        found |= {"do_nothing"} if not gold.changed and not task.communicate else set()
        found |= {"gold_error"} if gold.error else set()
        return tuple(sorted(found))


@cache
def load_domain(name: str) -> Domain:
    """The domain, read once in a process: episodes change nothing in it."""
    return Domain(name)


def respond(environment: Any, call: Call, call_id: str = "") -> Any:
    """tau2's ToolMessage for a call; a tool that fails answers with ``error`` set."""
    from tau2.data_model.message import ToolCall

    message = ToolCall(id=call_id, name=call.name, arguments=call.arguments)
    return environment.get_response(message)
