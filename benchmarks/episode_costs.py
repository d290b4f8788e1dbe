"""What an episode of each environment costs without a model: reset, a step, a whole game.

    python benchmarks/episode_costs.py [--episodes 10] [--only NAME] [--json FILE]

Each environment is played by its oracle where it has one, else by its own listed actions, so the
times are those of tools, databases, graders and browsers. Environments whose extra is not
installed are left out, by name. Times are of the wall clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from nlac_lightning.envs.base import Session, TextEnv
from nlac_lightning.errors import ConfigError


def help_desk() -> TextEnv:
    from nlac_lightning.envs.help_desk import HelpDeskEnv

    return HelpDeskEnv()


def tau2(domain: str) -> TextEnv:
    from nlac_lightning.envs.tau2 import Tau2Env

    return Tau2Env(domain)  # type: ignore[arg-type]


def twenty_questions() -> TextEnv:
    from nlac_lightning.envs.twenty_questions import TwentyQuestionsEnv

    return TwentyQuestionsEnv()


def sums() -> TextEnv:
    from nlac_lightning.envs.math import GeneratedProblems, MathEnv, Stage

    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    return MathEnv(GeneratedProblems([Stage("chain_sum", digits)]))


def gymnasium(env: str, **kwargs: Any) -> TextEnv:
    from nlac_lightning.envs.gymnasium_adapter import GymnasiumEnv

    return GymnasiumEnv(f"nlac_lightning.envs.{env}", kwargs)


def language_mdp() -> TextEnv:
    from nlac_lightning.envs.language_mdp import LanguageMDPEnv

    return LanguageMDPEnv(level=2)


ENVS: dict[str, Callable[[], TextEnv]] = {
    "help desk": help_desk,
    "tau2 retail": lambda: tau2("retail"),
    "tau2 airline": lambda: tau2("airline"),
    "20 Questions": twenty_questions,
    "sums": sums,
    "TextArena": lambda: gymnasium("textarena.TextArenaGame", game="GuessTheNumber-v0"),
    "language MDP": language_mdp,
    "MiniWoB++": lambda: gymnasium("miniwob.MiniWob", pages=["click-button", "enter-text"]),
}
MAX_STEPS = 30


def actions(session: Session, step: int) -> str:
    """The oracle's action, else one that the environment lists, else a number as a guess."""
    right = session.oracle_action()
    if right is not None:
        return right
    listed = list(session.admissible())
    return listed[step % len(listed)] if listed else f"[{step + 1}]"


def measure(env: TextEnv, episodes: int) -> dict[str, float]:
    """Mean milliseconds of a reset, a step and an episode, and steps per episode."""
    tasks = list(env.tasks("train"))
    env.reset(tasks[0]).close()  # what is loaded once is not an episode's cost
    resets, wholes, steps, stepping = [], [], 0, 0.0
    for number in range(episodes):
        began = time.perf_counter()
        session = env.reset(tasks[number % len(tasks)], number)
        resets.append(time.perf_counter() - began)
        for step in range(MAX_STEPS):
            action = actions(session, step)
            start = time.perf_counter()
            done = session.step(action)
            stepping += time.perf_counter() - start
            steps += 1
            if done.terminated or done.truncated:
                break
        session.close()
        wholes.append(time.perf_counter() - began)
    return {
        "reset": 1000 * fmean(resets),
        "step": 1000 * stepping / steps,
        "episode": 1000 * fmean(wholes),
        "steps": steps / episodes,
    }


def main() -> None:
    """Print the table; write the rows with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--only", choices=tuple(ENVS), help="one environment")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    print(f"{'':14}  reset ms   step ms  steps  episode ms")
    for name in [options.only] if options.only else ENVS:
        try:
            found = measure(ENVS[name](), options.episodes)
        except (ConfigError, ImportError) as error:
            print(f"{name:14}  left out: {error}")
            continue
        print(
            f"{name:14}  {found['reset']:8.1f}  {found['step']:8.2f}  {found['steps']:5.1f}  "
            f"{found['episode']:10.1f}",
            flush=True,
        )
        settings = {"environment": name, "episodes": options.episodes}
        rows += [
            {
                "name": f"{name}: {part}",
                "value": value,
                "unit": "steps" if part == "steps" else "ms",
                "settings": settings,
            }
            for part, value in found.items()
        ]
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
