"""MiniWoB++ in a real Chromium: five pages solved by scripts, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("browsergym.core", reason="needs the extra web")
pytest.importorskip("browsergym.miniwob", reason="needs the extra web")

import playwright.sync_api

from nlac_lightning.envs import miniwob
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


def test_windows_side_by_side_are_apart_and_equal_seeds_equal() -> None:
    first, second, again = (start("enter-text", number) for number in (0, 1, 0))
    assert first.opening == again.opening != second.opening
    field = mark(goal_and_page(first)[1], "textbox")
    told = first.step(f'fill("{field}", "abc")').messages[0]["content"]
    assert "abc" in told and "abc" not in second.step("scroll(0, 10)").messages[0]["content"]
    goal, page = goal_and_page(second)
    assert play(second, enter_text(goal, page))[-1].reward == 1
    wrong = play(first, iter([f'click("{mark(goal_and_page(first)[1], "button", "Submit")}")']))[0]
    assert wrong.terminated and (wrong.reward, wrong.info["reason"]) == (0.0, "failed")
    assert first.step("scroll(0, 10)").info["error"] == "the episode is over"
    for session in (first, second, again):
        session.close()


def test_what_is_no_action_is_answered_in_words_and_reaches_no_browser() -> None:
    session = start("click-button")
    for action in (
        "", "press it", 'goto("http://127.0.0.1/")', "noop(1e9)", "click(bid=open('x'))",
        'upload_file("12", "/etc/passwd")', "click(" * 300, 'click("1")\nclick("2")', "x" * 3000,
    ):  # fmt: skip
        step = session.step(action)
        assert not step.info["valid"] and step.info["error"], action
        assert not step.terminated and "Page:" in step.messages[0]["content"]
    missing = session.step('click("999")')
    assert missing.info["valid"] and "999" in missing.info["error"]
    assert missing.messages[0]["content"].startswith("Error:")
    session.close()


def test_listed_actions_are_readable_and_hold_a_right_one() -> None:
    session = start("enter-text")
    goal, page = goal_and_page(session)
    listed = session.admissible()
    right = list(enter_text(goal, page))
    assert set(right) <= set(listed) and "noop" not in str(listed)
    assert play(session, iter(right))[-1].reward == 1 and not session.admissible()
    session.close()


def test_a_browser_that_dies_costs_its_episodes_only() -> None:
    session = start("click-button")
    for browser in miniwob._browsers.values():
        browser.close()
    with pytest.raises(playwright.sync_api.Error):
        session.step("scroll(0, 10)")
    fresh = start("click-button")
    goal, page = goal_and_page(fresh)
    assert play(fresh, click_button(goal, page))[-1].reward == 1
    fresh.close()


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"pages": ["click-everything"]}, "env.kwargs.pages"),
        ({"pages": []}, "env.kwargs.pages"),
        ({"chromium": "/nowhere/chromium"}, "env.kwargs.chromium"),
        ({"max_chars": 0}, "env.kwargs.max_chars"),
    ],
)
def test_wrong_settings_name_their_field(kwargs: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MiniWob(**kwargs)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_only_actions_on_the_page_are_offered() -> None:
    assert set(MiniWob()._actions.action_set) == set(ACTIONS)
