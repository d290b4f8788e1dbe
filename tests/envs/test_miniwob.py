"""MiniWoB++ in a real Chromium: five pages solved by scripts, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

for package in ("gymnasium", "browsergym.core", "browsergym.miniwob", "miniwob"):
    pytest.importorskip(package, reason=f"needs the extra web: no {package}")

from nlac_lightning.envs.base import Session, Step
from nlac_lightning.envs.gymnasium_adapter import GymnasiumEnv
from nlac_lightning.envs.miniwob import ACTIONS, MiniWob, find_chromium
from nlac_lightning.errors import ConfigError

try:
    find_chromium()
except ConfigError as error:
    pytest.skip(f"needs Chromium: {error}", allow_module_level=True)

CLASS = "nlac_lightning.envs.miniwob.MiniWob"


def mark(page: str, kind: str, name: str = "") -> str:
    """The mark of the first element of a kind (and name) in an accessibility tree."""
    found = re.search(rf"\[(\w+)\] {kind} '{re.escape(name)}", page)
    assert found, f"no {kind} '{name}' in:\n{page}"
    return found[1]


def quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def click_button(goal: str, page: str) -> Iterator[str]:
    yield f'click("{mark(page, "button", quoted(goal)[0])}")'


def enter_text(goal: str, page: str) -> Iterator[str]:
    yield f'fill("{mark(page, "textbox")}", "{quoted(goal)[0]}")'
    yield f'click("{mark(page, "button", "Submit")}")'


def login_user(goal: str, page: str) -> Iterator[str]:
    fields = re.findall(r"\[(\w+)\] textbox", page)
    for field, text in zip(fields, quoted(goal), strict=True):
        yield f'fill("{field}", "{text}")'
    yield f'click("{mark(page, "button", "Login")}")'


def click_checkboxes(goal: str, page: str) -> Iterator[str]:
    names = re.fullmatch(r"Select (.*) and click Submit\.?", goal)
    assert names
    for name in names[1].split(", "):
        if name != "nothing":
            yield f'click("{mark(page, "checkbox", name)}")'
    yield f'click("{mark(page, "button", "Submit")}")'


def choose_list(goal: str, page: str) -> Iterator[str]:
    wanted = re.match(r"Select (.*) from the list", goal)
    assert wanted
    yield f'select_option("{mark(page, "combobox")}", "{wanted[1]}")'
    yield f'click("{mark(page, "button", "Submit")}")'


SCRIPTS = {
    "click-button": click_button,
    "enter-text": enter_text,
    "login-user": login_user,
    "click-checkboxes": click_checkboxes,
    "choose-list": choose_list,
}


def start(page: str, number: int = 0, **settings: object) -> Session:
    env = GymnasiumEnv(CLASS, {"pages": [page], **settings}, n_train=4, n_test=4)
    return env.reset(env.tasks("test")[number])


def goal_and_page(session: Session) -> tuple[str, str]:
    goal, _, page = session.opening[1]["content"].partition("\nPage:\n")
    return goal.removeprefix("Goal: "), page


def play(session: Session, actions: Iterator[str]) -> list[Step]:
    return [session.step(action) for action in actions]


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_scripted_policy_solves_the_page(page: str) -> None:
    goals = set()
    for number in range(2):
        session = start(page, number)
        goal, tree = goal_and_page(session)
        steps = play(session, SCRIPTS[page](goal, tree))
        session.close()
        assert (steps[-1].reward, steps[-1].info["reason"]) == (1.0, "solved"), (goal, tree)
        assert all(step.reward == 0 and step.info["valid"] for step in steps[:-1])
        goals.add(goal + tree)
    assert len(goals) == 2, "another seed is another task"
