"""Tasks: tau2's own, and those of files in the formats of tau2 and of the original tau-bench."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlac_lightning.envs.tau2.actions import Call
from nlac_lightning.errors import ConfigError
from nlac_lightning.users.base import UserTask

FIELD = "env.task_file"
FIX = "give a tasks_*.py or a JSON list of tasks of tau-bench or tau2"

ORDER_SENSITIVE = {"retail": {"20", "21", "36", "37", "100"}}
"""``modify_pending_order_items`` gives every item the last variant's price and options, so the
order of the item pairs decides whether the database equals the gold one."""

KNOWN_BAD_GOLD = {
    "retail": {"12", "13", "18", "21", "59", "91", "107"},
    "airline": {"2", "7", "9", "23", "27", "29", "33", "35", "37", "38", "44"},
}
"""Tasks whose gold actions were corrected in a later release of tau2."""

MASKS = ("do_nothing", "order_sensitive", "known_bad_gold", "gold_error")
"""Reasons to leave a task out: an agent that does nothing earns its reward; see above; see above;
a gold action that should change the database is refused by its tool."""


@dataclass(frozen=True)
class TauTask:
    """What the customer wants and how it ought to end.

    Attributes:
        id: unique in the environment.
        user: what the customer knows and wants.
        gold: the calls after which the database is as it should be.
        communicate: what the agent has to tell, as text to be found in its messages.
        own: one of tau2's tasks, to which the lists of this module apply.
    """

    id: str
    user: UserTask
    gold: tuple[Call, ...]
    communicate: tuple[str, ...]
    own: bool = False

    def known_masks(self) -> set[str]:
        """Those of :data:`MASKS` that need no look at the database."""
        domain = self.user.domain
        lists = {"order_sensitive": ORDER_SENSITIVE, "known_bad_gold": KNOWN_BAD_GOLD}
        return {n for n, ids in lists.items() if self.own and self.id in ids.get(domain, ())}


def from_tau2(task: Any, own: bool = True) -> TauTask:
    """A task of tau2, given as its pydantic model; ValueError for what it scores otherwise."""
    criteria = task.evaluation_criteria
    basis = {kind.value for kind in criteria.reward_basis}
    if not basis <= {"DB", "COMMUNICATE"} or criteria.env_assertions or task.initial_state:
        raise ValueError(f"task {task.id} needs more than database and communicated facts")
    wants = task.user_scenario.instructions
    user = UserTask(
        task_id=task.id,
        reason_for_call=wants.reason_for_call,
        known_info=wants.known_info or "",
        unknown_info=wants.unknown_info or "",
        instructions=wants.task_instructions,
        persona=task.user_scenario.persona or "",
        domain=wants.domain,
    )
    gold = tuple(Call(action.name, action.arguments) for action in criteria.actions or ())
    return TauTask(task.id, user, gold, tuple(criteria.communicate_info or ()), own)


def from_tau_bench(
    record: Mapping[str, Any], task_id: str, domain: str, tools: Sequence[str]
) -> TauTask:
    """A task of the original tau-bench: ``instruction``, ``actions``, ``outputs``.

    Its one instruction says first who the customer is; that becomes ``known_info``. Gold actions
    without a tool in tau2 (``think``) change nothing and are dropped.
    """
    identity, wish = _split_instruction(str(record["instruction"]))
    user = UserTask(task_id, wish, identity, "", "", domain=domain)
    gold = [
        Call(str(action["name"]), dict(action.get("kwargs", action.get("arguments", {}))))
        for action in record["actions"]
    ]
    known = tuple(call for call in gold if call.name in tools)
    outputs = tuple(str(output).replace(",", "") for output in record.get("outputs") or ())
    return TauTask(task_id, user, known, outputs)


def read_tasks(path: str | Path, domain: str, tools: Sequence[str]) -> list[TauTask]:
    """Tasks of a file, read as data: a Python file is never run.

    Raises:
        ConfigError: no such file, or not one of the formats; the message names the entry.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        records = _python_records(text) if str(path).endswith(".py") else json.loads(text)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(FIELD, f"cannot read {path} ({error})", FIX) from error
    if not isinstance(records, list) or not records:
        raise ConfigError(FIELD, f"{path} holds no list of tasks", FIX)
    tasks = []
    for number, record in enumerate(records):
        try:
            tasks.append(_read_one(record, number, domain, tools))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"entry {number} of {path} is not a task ({type(error).__name__}: {error})"
            raise ConfigError(FIELD, problem, FIX) from error
    doubled = len(tasks) - len({task.id for task in tasks})
    if doubled:
        raise ConfigError(FIELD, f"{path} has {doubled} task ids twice", "make them unique")
    return tasks


def _read_one(record: Any, number: int, domain: str, tools: Sequence[str]) -> TauTask:
    if "user_scenario" in record:
        from tau2.data_model.tasks import Task

        return from_tau2(Task.model_validate(record), own=False)
    return from_tau_bench(record, f"file-{number}", domain, tools)


def _python_records(source: str) -> list[dict[str, Any]]:
    """The longest list in a Python file whose items are ``Task(...)`` calls or dicts."""
    lists = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.List)]
    longest = max(lists, key=lambda node: len(node.elts), default=None)
    return [_literal(item) for item in longest.elts] if longest else []


def _literal(node: ast.AST) -> Any:
    """A literal in which calls such as ``Action(name=..., kwargs=...)`` stand for dicts."""
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.args:
            raise ValueError(f"line {node.lineno} calls a function: {ast.unparse(node)[:60]}")
        return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {
            ast.literal_eval(key): _literal(value)  # type: ignore[arg-type]
            for key, value in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)


def _split_instruction(text: str) -> tuple[str, str]:
    """Who the customer is (the first sentence), and what they want (the rest)."""
    parts = re.split(r"(?<=[.!?])\s+", text.strip(), maxsplit=1)
    identity = parts[0] if re.match(r"(you are|your name|you're)\b", parts[0], re.I) else ""
    wish = parts[1] if identity and len(parts) > 1 else text.strip()
    return identity, wish
