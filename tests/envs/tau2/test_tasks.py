"""Task files: read as data, in every form, and refused with the entry at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning.envs.tau2.actions import Call
from nlac_lightning.envs.tau2.tasks import read_tasks
from nlac_lightning.errors import ConfigError

TOOLS = ["cancel_pending_order", "get_order_details"]
PYTHON = """
import os
os.remove("never run")
from tau_bench.types import Task, Action
NAMES = ["a", "b"]
TASKS_TRAIN = [
    Task(
        annotator="0",
        user_id="omar_anderson_3203",
        instruction="Your name is Omar and your zip code is 19031. You are "
        "logical. Cancel #W6067464.",
        actions=[
            Action(name="think", kwargs={"thought": "hm"}),
            Action(
                name="cancel_pending_order",
                kwargs={"order_id": "#W6067464", "reason": "no longer needed", "n": [1, (2, -3)]},
            ),
        ],
        outputs=["1,093.34"],
    ),
    Task(annotator="0", user_id="x", instruction="Call it off.", actions=[], outputs=[]),
    Task(annotator="0", user_id="x", instruction="Call it off.", actions=[], outputs=[]),
]
"""


def test_a_python_file_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "tasks_train.py"
    path.write_text(PYTHON)
    tasks = read_tasks(path, "retail", TOOLS)
    assert [task.id for task in tasks] == ["file-0", "file-1", "file-2"]
    first = tasks[0]
    assert first.user.known_info == "Your name is Omar and your zip code is 19031."
    assert first.user.reason_for_call == "You are logical. Cancel #W6067464."
    arguments = {"order_id": "#W6067464", "reason": "no longer needed", "n": [1, [2, -3]]}
    assert first.gold == (Call("cancel_pending_order", arguments),)
    assert first.communicate == ("1093.34",)
    assert tasks[1].user.known_info == "" and tasks[1].user.reason_for_call == "Call it off."


def test_tau2s_own_format_is_read(retail: Any, tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    from tau2.domains.retail.environment import get_tasks

    own = get_tasks("train")[:3]
    path.write_text(json.dumps([task.model_dump(mode="json") for task in own]))
    tasks = read_tasks(path, "retail", TOOLS)
    for task in tasks:
        known = retail.task(task.id)
        assert (task.user, task.gold, task.communicate) == (
            known.user,
            known.gold,
            known.communicate,
        )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "cannot read"),
        ("a.json", "[]", "no list of tasks"),
        ("a.json", '{"tasks": []}', "no list of tasks"),
        ("a.json", '[{"actions": []}]', "entry 0 .*instruction"),
        ("a.json", "[3]", "entry 0"),
        ("a.json", '[{"instruction": "x", "actions": [{"kwargs": {}}]}]', "entry 0 .*name"),
        ("a.py", "TASKS = [Task(instruction=f(x), actions=[])]", "line 1 calls a function"),
        ("a.py", "def (", "cannot read"),
        ("a.py", "TASKS = [Task(instruction=open('x').read())]", "line 1 calls a function"),
        ("a.py", "x = 1", "no list"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_tasks(path, "retail", TOOLS)
