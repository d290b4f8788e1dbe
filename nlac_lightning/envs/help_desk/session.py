"""One dialogue: parses actions, counts turns, scores the end, answers for the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from nlac_lightning.envs.base import OracleCritique, Session, Step
from nlac_lightning.envs.help_desk.candidates import candidates
from nlac_lightning.envs.help_desk.commands import Command, CommandError, parse
from nlac_lightning.envs.help_desk.rules import Desk, Outcome, State, customer_says
from nlac_lightning.envs.help_desk.wording import phrase

_UNSOLVABLE = "it can no longer be solved."


class HelpDeskSession(Session):
    """A dialogue with one customer, which only the customer ends.

    ``Step.info`` always holds ``valid`` (a known command with arguments of the right form),
    ``right`` (the task can still be solved and this action brought the solution nearer) and
    ``error`` (what was wrong, or None); the last one holds ``reason``: ``solved``,
    ``wrong_outcome`` or ``customer_left``.

    Args:
        desk: the rules and the scenario.
        max_turns: the customer leaves after this many actions.
    """

    def __init__(self, desk: Desk, max_turns: int) -> None:
        self.desk, self.max_turns = desk, max_turns
        self.state, self.turn = desk.start(), 0
        self.opening = [
            {"role": "system", "content": desk.level.system},
            customer_says(desk.scenario.requests[0].text),
        ]

    @property
    def ended(self) -> bool:
        """Whether the customer has left."""
        return self.state.closed or self.turn >= self.max_turns

    def step(self, action: str) -> Step:
        """Carry out one action; reward 1 comes with the last message of a solved task."""
        if self.ended:
            info = {"valid": False, "right": False, "error": "the customer has left"}
            return Step([], terminated=True, info=info)
        before = self._steps_left(self.state, self.turn)
        valid, outcome = self._try(action)
        self.turn, self.state = self.turn + 1, outcome.state
        after = self._steps_left(self.state, self.turn)
        right = before is not None and after is not None and after < before
        info = {"valid": valid, "right": right, "error": outcome.problem}
        messages = outcome.messages
        solved = self.state.closed and self.desk.solved(self.state)
        if self.state.closed:
            info["reason"] = "solved" if solved else "wrong_outcome"
        elif self.ended:
            info["reason"] = "customer_left"
            messages = [*messages, customer_says("This takes too long. Bye.")]
        return Step(messages, float(solved), terminated=self.ended, info=info)

    def admissible(self) -> Sequence[str]:
        """Right and wrong actions for exploration: every command, with what the agent can know."""
        return () if self.ended else candidates(self.desk, self.state)

    def oracle_action(self) -> str | None:
        """The next right action; ``close`` when the task can no longer be solved."""
        if self.ended:
            return None
        return str(self._next())

    def oracle_critique(self, action: str) -> OracleCritique | None:
        """Good exactly if the task can be solved and ``action`` brings the solution nearer."""
        if self.ended:
            return None
        before = self._steps_left(self.state, self.turn)
        if before is None:
            return OracleCritique(False, _UNSOLVABLE, "close")
        _, outcome = self._try(action)
        after = self._steps_left(outcome.state, self.turn + 1)
        step = self._next()
        if after is not None and after < before:
            return OracleCritique(True, f"it is time to {phrase(step)}.", str(step))
        return OracleCritique(False, f"{outcome.problem}.", str(step))

    def _next(self) -> Command:
        if self._steps_left(self.state, self.turn) is None:
            return Command("close")
        return self.desk.plan(self.state)[0]

    def _steps_left(self, state: State, turn: int) -> int | None:
        """Length of the shortest solution, or None when there is none in the turns left."""
        steps = len(self.desk.plan(state))
        return None if state.spoiled or steps > self.max_turns - turn else steps

    def _try(self, action: str) -> tuple[bool, Outcome]:
        """Whether ``action`` is valid, and what it would lead to."""
        try:
            command = parse(action, self.desk.level.commands)
        except CommandError as error:
            # Where errors say what comes next, how to write the command is in the opening.
            problem = "unknown command" if self.desk.level.ids_first else str(error)
            return False, self.desk.error(self.state, problem)
        return True, self.desk.apply(self.state, command)
