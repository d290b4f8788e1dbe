"""The help desk as an environment: settings, tasks by split, sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.envs.help_desk.generate import MAX_TASKS, SPLITS, scenarios
from nlac_lightning.envs.help_desk.levels import LEVELS
from nlac_lightning.envs.help_desk.rules import Desk
from nlac_lightning.envs.help_desk.session import HelpDeskSession
from nlac_lightning.envs.help_desk.world import Scenario
from nlac_lightning.errors import ConfigError, require_choice, require_positive


class HelpDeskEnv(TextEnv):
    """Customer service over a small database, with a scripted customer; reward 1 if all is right.

    Args:
        level: 0 (short prompts, 4 or 5 actions, errors say what comes next), 1 (the agent must
            ask for ids, 6 or 7), 2 (details on request, several items, a policy that forbids
            some requests, 6 to 10) or 3 (two requests in one dialogue, 8 to 11).
        n_train, n_val, n_test: number of tasks of each split, 1 to 20,000.
        seed: other seeds give other tasks; each split keeps to customers of its own.
        max_turns: the customer leaves after this many actions; None is the level's default.
        intents: restrict the tasks to these; None is all of the level.

    Raises:
        ConfigError: a setting that is out of range or leaves no tasks.
    """

    def __init__(
        self,
        level: int = 0,
        n_train: int = 512,
        n_val: int = 96,
        n_test: int = 96,
        seed: int = 0,
        max_turns: int | None = None,
        intents: Sequence[str] | None = None,
    ) -> None:
        if level not in range(len(LEVELS)):
            raise ConfigError("env.level", f"{level} is unknown", "use 0, 1, 2 or 3")
        self._level = LEVELS[level]
        self._sizes = dict(zip(SPLITS, (n_train, n_val, n_test), strict=True))
        for split, size in self._sizes.items():
            require_positive(f"env.n_{split}", size)
            if size > MAX_TASKS:
                raise ConfigError(f"env.n_{split}", f"{size} is too many", f"use up to {MAX_TASKS}")
        if max_turns is not None:
            require_positive("env.max_turns", max_turns)
        allowed = self._level.intents if intents is None else tuple(intents)
        for intent in allowed:
            require_choice("env.intents", intent, self._level.intents)
        self._plans = [plan for plan in self._level.plans if set(plan) <= set(allowed)]
        if not self._plans:
            combinations = ", ".join("+".join(plan) for plan in self._level.plans)
            raise ConfigError(
                "env.intents",
                f"{list(allowed)} leaves no tasks at level {level}",
                f"include one of {combinations}",
            )
        self.max_turns = self._level.max_turns if max_turns is None else max_turns
        self.name = f"help_desk/{level}"
        self.seed = seed
        self._tasks: dict[str, list[Task]] = {}

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The level's commands as OpenAI function schemas."""
        return [spec.tool for spec in self._level.commands.values()]

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks ``train-0000``, ...; the kinds of request take turns, so a prefix is balanced."""
        require_choice("split", split, SPLITS)
        if split not in self._tasks:
            made = scenarios(self._level, self._plans, split, self._sizes[split], self.seed)
            self._tasks[split] = [
                Task(f"{split}-{i:04d}", split, scenario.to_data())
                for i, scenario in enumerate(made)
            ]
        return self._tasks[split]

    def reset(self, task: Task, seed: int = 0) -> HelpDeskSession:
        """Start a dialogue. The customer keeps to a script, so ``seed`` changes nothing."""
        return HelpDeskSession(Desk(self._level, Scenario.from_data(task.data)), self.max_turns)
