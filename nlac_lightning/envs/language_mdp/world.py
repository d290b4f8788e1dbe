"""Worlds: rooms, directed exits, traps and goals, drawn from a seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

DIRECTIONS = ("north", "east", "south", "west", "up", "down")
TRAP = "trap"
"""Where a trapped exit leads; a trap is no room, the walk ends in it."""

_NAMES = (
    "attic archive armory bakery ballroom bathroom bedroom boudoir cabin cellar chapel closet "
    "corridor courtyard crypt dairy den dungeon foyer gallery garage garden greenhouse gym hall "
    "kitchen laboratory larder laundry library lobby loft lounge nursery office pantry parlor "
    "porch stable studio study terrace theater tower vault veranda washroom workshop"
)
ROOMS = tuple(_NAMES.split())
MIN_DISTANCE = 4
"""Moves between a task's start and its goal, at least."""


@dataclass(frozen=True)
class Shape:
    """What a world is drawn from.

    Attributes:
        rooms: number of rooms, at most ``len(ROOMS)``.
        exits: exits of each room, at most ``len(DIRECTIONS)``.
        stride: an exit leads at most this many rooms on. All but one exit of a room lead back or
            into a trap, so wandering makes no headway.
        traps: probability that an exit which does not lead on is trapped.
        goals: number of goals; the rooms hardest to get to.
        survival: probability that a walk goes on after a move into an ordinary room.
    """

    rooms: int
    exits: int
    stride: int
    traps: float
    goals: int
    survival: float


@dataclass(frozen=True)
class World:
    """A map. It is the same for all tasks; a task adds a start and one of the goals.

    Attributes:
        exits: by room, where each of its exits leads: a room or :data:`TRAP`.
        goals: rooms that tasks ask for. A goal of one task is a room like others in another.
        survival: probability that a walk goes on after a move into an ordinary room.
    """

    exits: Mapping[str, Mapping[str, str]]
    goals: tuple[str, ...]
    survival: float

    def has_traps(self) -> bool:
        """Whether any exit is trapped."""
        return any(TRAP in exits.values() for exits in self.exits.values())

    def distances(self, goal: str) -> dict[str, int]:
        """Moves from each room to ``goal`` on a shortest way; rooms without a way are absent."""
        into: dict[str, list[str]] = {room: [] for room in self.exits}
        for room, exits in self.exits.items():
            for target in exits.values():
                if target != TRAP:
                    into[target].append(room)
        found, queue = {goal: 0}, deque([goal])
        while queue:
            room = queue.popleft()
            for before in into[room]:
                if before not in found:
                    found[before] = found[room] + 1
                    queue.append(before)
        return found

    def pairs(self) -> list[tuple[str, str]]:
        """(start, goal) of every possible task, nearest first."""
        far = [
            (distance, room, goal)
            for goal in self.goals
            for room, distance in self.distances(goal).items()
            if distance >= MIN_DISTANCE
        ]
        return [(room, goal) for _, room, goal in sorted(far)]


def draw_world(shape: Shape, rng: np.random.Generator) -> World:
    """A random world of this shape; names and directions say nothing about the way."""
    names = [str(name) for name in rng.permutation(ROOMS)[: shape.rooms]]
    exits: dict[str, dict[str, str]] = {}
    for i, name in enumerate(names):
        targets = [names[j] if j >= 0 else TRAP for j in _targets(i, shape, rng)]
        where = rng.permutation(len(DIRECTIONS))[: len(targets)]
        by_direction = dict(zip((DIRECTIONS[j] for j in where), targets, strict=True))
        # In one order everywhere, or a text would tell which exit was drawn first.
        exits[name] = {d: by_direction[d] for d in DIRECTIONS if d in by_direction}
    return World(exits, tuple(names[-shape.goals :]), shape.survival)


def _targets(i: int, shape: Shape, rng: np.random.Generator) -> list[int]:
    """Where the exits of the ``i``-th room lead, -1 for a trap: one exit on, the others not."""
    last = shape.rooms - 1
    onward = [int(rng.integers(i + 1, min(i + shape.stride, last) + 1))] if i < last else []
    others = shape.exits - len(onward)
    trapped = int(rng.binomial(others, shape.traps))
    # The first rooms have too few behind them, so some of their exits lead to a room nearby.
    behind = [j for j in range(max(i, shape.exits + 1)) if j != i and j not in onward]
    back = rng.permutation(behind)[: others - trapped]
    return [*onward, *(int(j) for j in back), *[-1] * trapped]
