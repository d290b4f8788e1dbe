"""MiniWoB++ in a real Chromium, as a Gymnasium environment of texts for the adapter beside it.

Pages, actions, marks of elements and rewards are BrowserGym's (arXiv 2412.05467); the tasks are
those of MiniWoB++ (arXiv 1802.08802), whose pages come with the package ``miniwob``.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import playwright.sync_api
import pyparsing
from browsergym.core import _get_global_playwright as get_playwright
from browsergym.core.action import functions
from browsergym.core.action.base import execute_python_code
from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.core.constants import BROWSERGYM_ID_ATTRIBUTE
from browsergym.core.observation import _post_extract as unmark
from browsergym.core.observation import _pre_extract as mark
from browsergym.core.observation import extract_merged_axtree
from browsergym.miniwob import ALL_MINIWOB_TASKS
from browsergym.utils.obs import flatten_axtree_to_str
from gymnasium.spaces import Text

from nlac_lightning.errors import ConfigError, require_positive

PAGES = {task.subdomain: task for task in ALL_MINIWOB_TASKS}
"""BrowserGym's task class of each page."""

ACTIONS = (
    "click", "dblclick", "fill", "select_option", "press", "hover", "focus", "clear", "scroll",
    "drag_and_drop",
)  # fmt: skip
"""BrowserGym's actions on elements. Those that leave the page, read files or wait are left out."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_CHARS = 2000
"""Longer actions are refused unread."""

_PATIENCE = 60
"""Seconds for a page to open; on a busy machine BrowserGym's five are too few."""
_REPEATS = ["LineBreak", "InlineTextBox"]
"""Roles of the tree that only repeat the text of the element above them."""
_CLICKABLE = re.compile(
    r"\[(\w+)\] (?:button|link|checkbox|radio|tab|option|menuitem|textbox|LabelText|heading)\b"
)
_FIELD = re.compile(r"\[(\w+)\] (?:textbox|searchbox|spinbutton)\b")
_QUOTED = re.compile(r'"([^"]+)"')


class MiniWob(gymnasium.Env[str, str]):
    """Pages of MiniWoB++, each opened in a window of its own of one Chromium.

    An observation is the goal, then after each action the accessibility tree of the page, in which
    elements are marked as ``[13]``, and what went wrong with the action. An action is one call such
    as ``click("13")`` or ``fill("14", "text")``. The reward is BrowserGym's: 1 at the end of a
    solved task, else 0. The browser has no network.

    Args:
        pages: names such as ``click-button``; seeds go over them in turn.
        url: folder of the pages, as a URL that ends in ``/``; None takes those of ``miniwob``.
        chromium: the browser's executable; None takes the system's, else Playwright's own.
        settle_seconds: wait between an action and the look at the page.
        max_chars: a longer tree is cut at its end.

    Raises:
        ConfigError: an unknown page, or no browser.
    """

    def __init__(
        self,
        pages: Sequence[str] = ("click-button",),
        url: str | None = None,
        chromium: str | None = None,
        settle_seconds: float = 0.1,
        max_chars: int = 6000,
    ) -> None:
        require_positive("env.kwargs.settle_seconds", settle_seconds, zero=True)
        require_positive("env.kwargs.max_chars", max_chars)
        unknown = [page for page in pages if page not in PAGES]
        if unknown or not pages:
            raise ConfigError(
                "env.kwargs.pages",
                f"MiniWoB++ has no {', '.join(unknown)}" if unknown else "there are none",
                f"use names such as {', '.join(list(PAGES)[:5])}",
            )
        self.observation_space = Text(10**6, charset=string.printable)
        self.action_space = Text(MAX_CHARS, min_length=1, charset=string.printable)
        self.pages, self.max_chars, self._settle = tuple(pages), max_chars, settle_seconds
        self._url = url or _packaged_pages()
        self._chromium = find_chromium(chromium)
        self._actions = _action_set()
        self._window: playwright.sync_api.BrowserContext | None = None
        self._goal = self._tree = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Open page number ``seed`` (modulo their number), filled by ``seed``."""
        super().reset(seed=seed)
        self.close()
        number = seed or 0
        self._task = PAGES[self.pages[number % len(self.pages)]](number, base_url=self._url)
        self._window = _browser(self._chromium).new_context(
            viewport=self._task.viewport, offline=True
        )
        self._window.set_default_timeout(1000 * _PATIENCE)
        self._page = self._window.new_page()
        self._goal = self._task.setup(self._page)[0].strip()
        return f"Goal: {self._goal}\n{self._look()}", {"page": self._task.subdomain}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out one action. What cannot be read reaches no browser."""
        try:
            code = self._code(action)
        except ValueError as error:
            info = {"valid": False, "error": str(error)}
            return f"Error: {error}\nPage:\n{self._tree}", 0.0, False, False, info
        failed = None
        try:
            execute_python_code(code, self._page, None, None)
        except Exception as error:  # whatever a browser says to an action it cannot do
            failed = str(error).strip().partition("\n")[0]
        self._page.wait_for_timeout(1000 * self._settle)
        reward, done, _, _ = self._task.validate(self._page, [])
        info = {"valid": True, "error": failed}
        if done:
            info["reason"] = "solved" if reward > 0 else "failed"
            return f"The task is over: {info['reason']}.", float(reward), True, False, info
        lead = f"Error: {failed}\n" if failed else ""
        return lead + self._look(), float(reward), False, False, info

    def admissible(self) -> list[str]:
        """Clicks on what can be clicked, and the goal's quoted words into each field."""
        words = dict.fromkeys(_QUOTED.findall(self._goal))
        fields = _FIELD.findall(self._tree)
        return [f"click({_text(bid)})" for bid in _CLICKABLE.findall(self._tree)] + [
            f"fill({_text(bid)}, {_text(word)})" for bid in fields for word in words
        ]

    def close(self) -> None:
        """Close the window."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def _look(self) -> str:
        mark(self._page, lenient=True)
        nodes = extract_merged_axtree(self._page)
        unmark(self._page)
        tree = flatten_axtree_to_str(nodes, ignored_roles=_REPEATS).replace("\t", " ").strip()
        tree = tree.partition("\n")[2]  # the first line is the window's title and address
        cut = tree[: self.max_chars]
        left_out = len(tree) - len(cut)
        self._tree = f"{cut}\n({left_out} characters left out)" if left_out else cut
        return f"Page:\n{self._tree}"

    def _code(self, action: str) -> str:
        """BrowserGym's code for an action: one known function with literal arguments.

        Raises:
            ValueError: the action is none; the message says why.
        """
        if len(action) > MAX_CHARS:
            raise ValueError(f"The action is longer than {MAX_CHARS} characters.")
        try:
            return self._actions.to_python_code(action)
        except (NameError, SyntaxError) as error:
            raise ValueError(str(error)) from error
        except (pyparsing.ParseBaseException, RecursionError) as error:
            raise ValueError("The action cannot be read.") from error


@cache
def _action_set() -> HighLevelActionSet:
    """BrowserGym's reader of actions; it takes a second to make."""
    chosen = [getattr(functions, name) for name in ACTIONS]
    actions = HighLevelActionSet(["custom"], chosen, multiaction=False)
    del actions.action_set["noop"]  # always added; a model could make it wait for ever
    return actions


_browsers: dict[str, playwright.sync_api.Browser] = {}


def _browser(executable: str) -> playwright.sync_api.Browser:
    """The process's browser, started when first needed and again after a crash."""
    running = _browsers.get(executable)
    if running is None or not running.is_connected():
        engine = get_playwright()
        engine.selectors.set_test_id_attribute(BROWSERGYM_ID_ATTRIBUTE)
        running = _browsers[executable] = engine.chromium.launch(executable_path=executable)
    return running


def find_chromium(named: str | None = None) -> str:
    """Path of a Chromium: the one named, the system's, or the one that Playwright installed.

    Raises:
        ConfigError: there is none.
    """
    for path in [named] if named else [shutil.which(name) for name in BROWSERS]:
        if path and Path(path).is_file():
            return path
    if named is None and Path(own := get_playwright().chromium.executable_path).is_file():
        return own
    raise ConfigError(
        "env.kwargs.chromium",
        f"there is no {named}" if named else "no Chromium is installed",
        "run `apt-get install chromium` or `playwright install chromium`, or name its executable",
    )


def _packaged_pages() -> str:
    spec = importlib.util.find_spec("miniwob")
    folder = Path(spec.origin or "").parent / "html" / "miniwob" if spec else None
    if folder is None or not folder.is_dir():
        raise ConfigError(
            "env.kwargs.url",
            "the pages of MiniWoB++ are not installed",
            "run pip install -e '.[web]', or give the URL of your copy",
        )
    return f"{folder.as_uri()}/"


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
