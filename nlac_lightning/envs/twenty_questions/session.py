"""One game: questions, guesses, and what the reference player thinks of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nlac_lightning.envs.base import Message, OracleCritique, Session, Step
from nlac_lightning.envs.twenty_questions.answerer import Answerer, NoAnswer
from nlac_lightning.envs.twenty_questions.names import Names
from nlac_lightning.envs.twenty_questions.player import best_question, gain
from nlac_lightning.envs.twenty_questions.table import ANSWERS, Table

MAX_CHARS = 300
"""Longer questions are not read."""


def says(text: str) -> Message:
    """A message of the answerer."""
    return {"role": "user", "name": "Answerer", "content": text}


class TwentyQuestionsSession(Session):
    """A game about one object.

    ``Step.info`` holds ``valid`` (a question of at most 300 characters), ``error`` (what was wrong
    with it, or None), ``answer`` and, after a guess, ``guess``; the last one holds ``reason``:
    ``guessed``, ``wrong_guess``, ``no_questions_left`` or ``user_failed`` (the answerer gave none).

    Args:
        secret: the object.
        opening: first messages.
        names: of all objects that a guess may name.
        answerer: answers what is no guess.
        questions: how many, guesses included.
        wrong_guess_ends: whether a wrong guess ends the game, or is one question answered "no".
        table: what the reference player knows; None leaves the game without an oracle.
        possible: objects of the table that the secret may be, to the player's knowledge.
        share: a question is good if it tells at least this share of what the best would tell.
    """

    def __init__(
        self,
        secret: str,
        opening: list[Message],
        names: Names,
        answerer: Answerer,
        questions: int,
        wrong_guess_ends: bool,
        table: Table | None,
        possible: Sequence[str],
        share: float,
    ) -> None:
        self.secret, self.opening = secret, opening
        self.names, self.answerer, self.table = names, answerer, table
        self.left, self.wrong_guess_ends, self.share = questions, wrong_guess_ends, share
        self.ended = False
        self.asked: set[str] = set()
        if table is not None:
            self.possible = np.isin(table.objects, list(possible))

    def step(self, action: str) -> Step:
        """Answer a question or judge a guess; reward 1 for the right name."""
        if self.ended:
            return Step([], terminated=True, info={"valid": False, "error": "the game is over"})
        guess = None if len(action) > MAX_CHARS else self.names.guess(action)
        problem = _problem(action)
        if guess is not None:
            answer = ANSWERS[2 if guess == self.secret else 0]
        elif problem:
            answer = ANSWERS[1]
        else:
            try:
                answer = self.answerer.answer(self.secret, action.strip())
            except NoAnswer as error:
                self.ended = True
                info = {"valid": True, "error": str(error), "reason": "user_failed"}
                return Step([], truncated=True, info=info)
        self.left -= 1
        self.asked.add(action)
        self._narrow(action, guess, answer)
        info = {"valid": problem is None, "error": problem, "answer": answer, "right": None}
        reason = None
        if guess is not None:
            info["guess"] = guess
            if guess == self.secret:
                reason = "guessed"
            elif self.wrong_guess_ends:
                reason = "wrong_guess"
        if reason is None and self.left <= 0:
            reason = "no_questions_left"
        text = answer
        if reason is not None:
            self.ended = True
            info["reason"] = reason
            end = "You win." if reason == "guessed" else "You lose."
            text = f"{answer}. {end} It was: {self.secret}."
        return Step([says(text)], float(reason == "guessed"), reason is not None, info=info)

    def admissible(self) -> Sequence[str]:
        """The plain question of each attribute, less those asked, and guesses when few are left."""
        if self.ended or self.table is None:
            return ()
        questions = [a.question for a in self.table.attributes if a.question not in self.asked]
        left = self._objects_left()
        return questions + [_guess(name) for name in left if len(left) <= 4 or self.left == 1]

    def oracle_action(self) -> str | None:
        """The question that tells most about the objects still possible, at last the guess."""
        if self.ended or self.table is None:
            return None
        best = best_question(self.table, self.possible) if self.possible.any() else None
        left = self._objects_left() or [self.secret]
        if best is None or len(left) == 1 or self.left == 1:
            return _guess(left[0])
        return best[0]

    def oracle_critique(self, action: str) -> OracleCritique | None:
        """How much the action narrows what the object may be, against the best question."""
        right = self.oracle_action()
        if right is None or self.table is None:
            return None
        guess = None if len(action) > MAX_CHARS else self.names.guess(action)
        if guess is not None and (self.wrong_guess_ends or self.left == 1):
            return self._judge_last_guess(guess, right)
        told = self._gain_of(action, guess)
        if self.left == 1:
            return OracleCritique(False, "this is the last chance to name the object.", right)
        if told is None:
            return OracleCritique(False, "the answer would not be clear.", right)
        before, left, bits = told
        if before == 1:
            good = guess is not None and bits == 0.0 and self._objects_left() == [guess]
            return OracleCritique(good, "only one object is left.", right)
        best = best_question(self.table, self.possible)
        wanted = self.share * best[1].bits if best else 0.0
        reason = f"it narrows {before} objects to {left:.3g}"
        if bits > 0 and bits >= wanted - 1e-9:
            return OracleCritique(True, reason + ".", right)
        better = f"; the best question to {best[1].left:.3g}." if best else "."
        return OracleCritique(False, reason + better, right)

    def _judge_last_guess(self, guess: str, right: str) -> OracleCritique:
        left = self._objects_left()
        if guess not in left:
            return OracleCritique(False, "the answers rule this object out.", right)
        if len(left) > 1 and self.left > 1 and right != _guess(guess):
            reason = f"it is a guess among {len(left)} objects, and a wrong guess ends the game."
            return OracleCritique(False, reason, right)
        return OracleCritique(True, f"1 of {len(left)} objects is left to name.", right)

    def _gain_of(self, action: str, guess: str | None) -> tuple[int, float, float] | None:
        """Objects possible before and expected after ``action``, and its bits."""
        values = self._values(action, guess)
        if values is None or not self.possible.any():
            return None
        told = gain(values, self.possible)
        return told.before, told.left, told.bits

    def _values(self, action: str, guess: str | None) -> np.ndarray | None:
        assert self.table is not None
        if guess is None:
            return None if _problem(action) else self.table.ask(action)
        values = np.zeros(len(self.table.objects), np.int8)
        values[self.table.index[guess]] = 2
        return values

    def _narrow(self, action: str, guess: str | None, answer: str) -> None:
        if self.table is None:
            return
        values = self._values(action, guess)
        if values is not None:
            self.possible &= values == ANSWERS.index(answer)

    def _objects_left(self) -> list[str]:
        assert self.table is not None
        return [self.table.objects[i] for i in np.flatnonzero(self.possible)]


def _guess(name: str) -> str:
    article = "an" if name[0] in "aeiou" else "a"
    return f"Is it {article} {name}?"


def _problem(action: str) -> str | None:
    if not action.strip():
        return "no question"
    return f"more than {MAX_CHARS} characters" if len(action) > MAX_CHARS else None
