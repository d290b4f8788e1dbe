"""The reference player: asks what tells it most, and so knows how good any question is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlac_lightning.envs.twenty_questions.table import NO, UNCLEAR, YES, Table

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Gain:
    """What a question does to the objects that are still possible, each as likely as the others.

    Attributes:
        bits: expected information of its answer, at least 0.
        before: number of objects possible before it, at least 1.
        left: expected number after it, at least 1.
    """

    bits: float
    before: int
    left: float


def gains(answers: NDArray[np.int8], possible: Bools) -> list[Gain]:
    """Gain of each question.

    Args:
        answers: [objects, questions].
        possible: [objects], which may be meant; at least one.
    """
    told = answers[possible]
    counts = np.stack([(told == answer).sum(0) for answer in (NO, UNCLEAR, YES)])
    shares = counts / len(told)
    bits = -(shares * np.log2(np.where(counts > 0, shares, 1.0))).sum(0)
    left = (shares * counts).sum(0)
    # The sum of nothing but log 1 is minus zero.
    return [Gain(max(float(b), 0.0), len(told), float(n)) for b, n in zip(bits, left, strict=True)]


def gain(answers: NDArray[np.int8], possible: Bools) -> Gain:
    """Gain of one question with ``answers`` [objects]."""
    return gains(answers[:, None], possible)[0]


def best_question(table: Table, possible: Bools) -> tuple[str, Gain] | None:
    """The attribute's question that tells most, the first of equals; None where none helps."""
    told = gains(table.values, possible)
    best = max(range(len(told)), key=lambda j: told[j].bits)
    return (table.attributes[best].question, told[best]) if told[best].bits > 0 else None
