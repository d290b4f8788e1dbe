"""All that is ever said in a world of rooms, from a small vocabulary.

Each text is one line of words, with punctuation that a tokenizer can take as words of their own.
The last text alone says all that matters of a walk: room, goal and exits.
"""

from __future__ import annotations

import re

from nlac_lightning.envs.base import Message, OracleCritique
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, ROOMS, TRAP, World

SPEAKER, AGENT = "World", "Agent"
SYSTEM = "Walk to the goal. Say one exit."
_WALL = "no such exit."
_SOLVED, _TRAPPED, _DARK = "goal. End: solved.", "End: failed.", "dark. End: failed."
_ONWARD, _ASTRAY, _INTO_TRAP = "it leads to the goal.", "it leads away.", "it leads into a trap."

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """A text as the words of :func:`vocabulary`."""
    return _WORD.findall(text)


def vocabulary() -> list[str]:
    """Every word and punctuation mark of any world's texts, sorted; the same for all levels."""
    critiques = [
        OracleCritique(good, reason, DIRECTIONS[0]).text()
        for good in (True, False)
        for reason in (_ONWARD, _ASTRAY, _INTO_TRAP, _WALL)
    ]
    fixed = [SYSTEM, f"{SPEAKER}: {AGENT}:", _WALL, *critiques]
    fixed += [goal_text(ROOMS[0]), trap_text(), dark_text(ROOMS[0]), *ROOMS, *DIRECTIONS]
    return sorted({word for text in fixed for word in words(text)})


def state_text(world: World, room: str, goal: str) -> str:
    """``hall, goal attic. north: cellar, up: trap.``: where we are and where each exit leads."""
    exits = ", ".join(f"{way}: {target}" for way, target in world.exits[room].items())
    return f"{room}, goal {goal}. {exits}."


def wall_text(world: World, room: str, goal: str) -> str:
    """Answer to a direction without an exit, or to words that are no direction."""
    return f"{_WALL} {state_text(world, room, goal)}"


def goal_text(goal: str) -> str:
    """The walk ends at the goal."""
    return f"{goal}, {_SOLVED}"


def trap_text() -> str:
    """The walk ends in a trap."""
    return f"{TRAP}. {_TRAPPED}"


def dark_text(room: str) -> str:
    """The walk ends by chance in a room: the light goes out."""
    return f"{room}, {_DARK}"


def said(content: str) -> Message:
    """A message of the world."""
    return {"role": "user", "content": content, "name": SPEAKER}


def parse(action: str) -> str | None:
    """The direction that a text names, None where it names none."""
    word = action.strip().rstrip(".").lower()
    return word if word in DIRECTIONS else None


def reason_text(good: bool, target: str | None) -> str:
    """Why an action is right or wrong.

    Args:
        good: no exit is better, and it leads to the goal in the end.
        target: where it leads, None without such an exit.
    """
    if target is None:
        return _WALL
    if target == TRAP:
        return _INTO_TRAP
    return _ONWARD if good else _ASTRAY
