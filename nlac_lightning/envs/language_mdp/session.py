"""One walk: moves, ends by chance, and answers for the oracle from the exact solution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nlac_lightning.envs.base import OracleCritique, Session, Step
from nlac_lightning.envs.language_mdp.exact import ExactWorld, State
from nlac_lightning.envs.language_mdp.solve import Values
from nlac_lightning.envs.language_mdp.texts import (
    SYSTEM,
    dark_text,
    goal_text,
    parse,
    reason_text,
    said,
    state_text,
    trap_text,
    wall_text,
)
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, TRAP

_TIE = 1e-9


class LanguageMDPSession(Session):
    """A walk from a start to a goal.

    ``Step.info`` holds ``valid`` (the action names an exit), ``right`` (no exit is better),
    ``error`` (what was wrong, or None) and at the end ``reason``: ``solved``, ``trap`` or
    ``dark`` (it ended by chance, which has the same probability after every move).

    Args:
        exact: the world and its solution.
        state: first (room, goal).
        rng: decides when the light goes out.
    """

    def __init__(self, exact: ExactWorld, state: State, rng: np.random.Generator) -> None:
        self.exact, self.rng = exact, rng
        self.room, self.goal = state
        self.ended = False
        self.opening = [
            {"role": "system", "content": SYSTEM},
            said(state_text(exact.world, self.room, self.goal)),
        ]

    @property
    def state(self) -> int:
        """Index of the present state in the arrays of ``exact``; an error once ended."""
        return self.exact.index[self.room, self.goal]

    def step(self, action: str) -> Step:
        """Take an exit; a text that names none leaves the walker where he is."""
        if self.ended:
            over = {"valid": False, "right": False, "error": "the walk is over"}
            return Step([], terminated=True, info=over)
        target = self._target(action)
        info: dict[str, Any] = {
            "valid": target is not None,
            "right": self._right(action),
            "error": None if target else "no such exit",
        }
        # One draw for each step whatever the action, so the light of a seed is the same for all.
        dark = self.rng.random() >= self.exact.world.survival
        if target == self.goal:
            return self._end(goal_text(self.goal), 1.0, "solved", info)
        if target == TRAP:
            return self._end(trap_text(), 0.0, "trap", info)
        self.room = target or self.room
        if dark:
            return self._end(dark_text(self.room), 0.0, "dark", info)
        text = state_text if target else wall_text
        return Step([said(text(self.exact.world, self.room, self.goal))], info=info)

    def reseed(self, seed: int) -> None:
        """Decide anew when the light goes out."""
        self.rng = np.random.Generator(np.random.Philox(seed))

    def admissible(self) -> Sequence[str]:
        """The exits of the room."""
        return () if self.ended else tuple(self.exact.world.exits[self.room])

    def oracle_action(self) -> str | None:
        """An exit on a best way to the goal."""
        return None if self.ended else DIRECTIONS[int(self._best().argmax())]

    def oracle_critique(self, action: str) -> OracleCritique | None:
        """Good exactly if no exit has a higher value, and the goal can still be reached."""
        if self.ended:
            return None
        target, good = self._target(action), self._right(action)
        best = parse(action) if good else self.oracle_action()
        return OracleCritique(good, reason_text(good, target), str(best))

    @property
    def _optimum(self) -> Values:
        return self.exact.optimum[1]

    def _best(self) -> np.ndarray:
        """[A], the exits that no exit is better than; all of them where none leads to the goal."""
        allowed = self.exact.mdp.allowed[self.state]
        return allowed & (self._optimum.q[self.state] >= self._optimum.v[self.state] - _TIE)

    def _right(self, action: str) -> bool:
        word = parse(action)
        reachable = self._optimum.v[self.state] > 0
        return bool(word and reachable and self._best()[DIRECTIONS.index(word)])

    def _target(self, action: str) -> str | None:
        return self.exact.world.exits[self.room].get(parse(action) or "")

    def _end(self, text: str, reward: float, reason: str, info: dict[str, Any]) -> Step:
        self.ended = True
        return Step([said(text)], reward, terminated=True, info={**info, "reason": reason})
