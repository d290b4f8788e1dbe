"""Any Gymnasium environment whose observations and actions are text, by class path."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from nlac_lightning.envs.base import Session, Step, Task, TextEnv
from nlac_lightning.errors import ConfigError, require_choice, require_positive

_FIRST_SEED = {"train": 0, "val": 1_000_000, "test": 2_000_000}


class GymnasiumEnv(TextEnv):
    """A ``gymnasium.Env`` with ``Text`` spaces. A task is a seed of its ``reset``.

    Args:
        env: class path, such as ``nlac_lightning.envs.textarena.TextArenaGame``.
        kwargs: arguments of the class.
        system: the system message: rules that the observations do not tell, and how to act.
        n_train, n_val, n_test: number of tasks, up to 1,000,000; the splits share no seed.
        seed: added to all seeds, times 10,000,000; 0 to 200.
        name: stored with the episodes; None is the class and its arguments.

    Raises:
        ConfigError: no such class, arguments that it refuses, or spaces that are not ``Text``.
    """

    def __init__(
        self,
        env: str,
        kwargs: dict[str, Any] | None = None,
        system: str = "Act in the game by text.",
        n_train: int = 256,
        n_val: int = 48,
        n_test: int = 48,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("env", "needs gymnasium", "run pip install -e '.[gym]'")
        self._sizes = dict(zip(_FIRST_SEED, (n_train, n_val, n_test), strict=True))
        for split, size in self._sizes.items():
            require_positive(f"env.n_{split}", size)
            require_positive(f"env.n_{split}", 1_000_001 - size)
        require_positive("env.seed", seed, zero=True)
        require_positive("env.seed", 200 - seed, zero=True)
        self.seed, self.system = seed, system
        self._make = _maker(env, dict(kwargs or {}))
        _check_spaces(env, self._make)
        self.name = name or " ".join(
            [env.rpartition(".")[2], *(f"{k}={json.dumps(v)}" for k, v in (kwargs or {}).items())]
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks ``train-0000``, ..., each a seed of its own."""
        require_choice("split", split, tuple(_FIRST_SEED))
        first = _FIRST_SEED[split] + 10_000_000 * self.seed
        return [
            Task(f"{split}-{i:04d}", split, {"seed": first + i}) for i in range(self._sizes[split])
        ]

    def reset(self, task: Task, seed: int = 0) -> GymnasiumSession:
        """Start an episode with the task's seed; ``seed`` changes nothing."""
        return GymnasiumSession(self._make(), self.system, task.data["seed"])


class GymnasiumSession(Session):
    """One episode of a Gymnasium environment.

    Calls are made under the episode's own state of Python's global random numbers, which some
    games draw from: sessions side by side do not disturb one another, nor anything else.

    ``Step.info`` holds the environment's own facts as far as they are JSON; ``valid`` is False
    where the action lies outside the action space.

    Args:
        env: the environment.
        system: first message.
        seed: of its ``reset``.
    """

    def __init__(self, env: Any, system: str, seed: int) -> None:
        self.env, self.ended = env, False
        self._random = random.Random(seed).getstate()
        observation, _ = self._call(lambda: env.reset(seed=seed))
        self.opening = [{"role": "system", "content": system}, _observed(observation)]

    def step(self, action: str) -> Step:
        """One step; errors of the environment end the episode, as everywhere."""
        if self.ended:
            return Step([], terminated=True, info={"valid": False, "error": "the episode is over"})
        observation, reward, terminated, truncated, info = self._call(lambda: self.env.step(action))
        self.ended = bool(terminated or truncated)
        valid = bool(self.env.action_space.contains(action))
        facts = {"valid": valid, "error": None if valid else "outside the action space"}
        facts |= {k: v for k, v in info.items() if _is_json(v)}
        messages = [_observed(observation)] if observation else []
        return Step(messages, float(reward), bool(terminated), bool(truncated), facts)

    def admissible(self) -> Sequence[str]:
        """What the environment's own method of this name lists, if it has one."""
        listed = getattr(self.env, "admissible", None)
        return () if self.ended or listed is None else listed()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _call(self, act: Callable[[], Any]) -> Any:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            return act()
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _observed(text: str) -> Any:
    return {"role": "user", "name": "Game", "content": str(text)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _maker(path: str, kwargs: dict[str, Any]) -> Callable[[], Any]:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "env.env",
            f"cannot import '{path}': {error}",
            "give package.module.Class; TextArenaGame needs the extra [gym], MiniWob [web]",
        ) from error
    return lambda: cls(**kwargs)


def _check_spaces(path: str, make: Callable[[], Any]) -> None:
    import gymnasium

    try:
        env = make()
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError("env.kwargs", f"{path} refuses them: {error}", "correct them") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError("env.env", f"{path} is no gymnasium.Env", "wrap it in one")
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(
                "env.env",
                f"{path} has the {name} {space}, not Text",
                "wrap it in a class that turns it into text",
            )
    env.close()
