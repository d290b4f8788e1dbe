"""A world as a finite decision process, and the policies that need no learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nlac_lightning.envs.language_mdp.solve import (
    Array,
    FiniteMDP,
    Values,
    optimal,
    success_rate,
)
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, TRAP, World

State = tuple[str, str]
"""(room, goal): all that matters of a walk so far."""


@dataclass(frozen=True)
class ExactWorld:
    """All tasks of a world as one process.

    Actions are :data:`DIRECTIONS`. A direction without an exit is a wall: the walker stays, and
    the walk may end as after any move. Text that names no direction has the same effect, so a
    policy that sometimes writes nonsense is evaluated exactly with that share on any wall.

    Attributes:
        world: the map.
        starts: (start, goal) of the tasks, all equally likely.
    """

    world: World
    starts: tuple[State, ...]

    @cached_property
    def states(self) -> list[State]:
        """Every state that is not an end."""
        return [
            (room, goal) for goal in self.world.goals for room in self.world.exits if room != goal
        ]

    @cached_property
    def index(self) -> dict[State, int]:
        """Position of each state in the arrays."""
        return {state: i for i, state in enumerate(self.states)}

    @cached_property
    def mdp(self) -> FiniteMDP:
        """The arrays; S is ``len(states)``, A is ``len(DIRECTIONS)``."""
        size = (len(self.states), len(DIRECTIONS))
        transition, success = np.zeros((*size, size[0])), np.zeros(size)
        allowed, start = np.zeros(size, dtype=bool), np.zeros(size[0])
        for i, (room, goal) in enumerate(self.states):
            for a, direction in enumerate(DIRECTIONS):
                allowed[i, a] = direction in self.world.exits[room]
                target = self.world.exits[room].get(direction, room)
                if target == goal:
                    success[i, a] = 1.0
                elif target != TRAP:
                    transition[i, a, self.index[target, goal]] = self.world.survival
        for state in self.starts:
            start[self.index[state]] += 1 / len(self.starts)
        return FiniteMDP(transition, success, allowed, start)

    @cached_property
    def optimum(self) -> tuple[Array, Values]:
        """An optimal policy and its values."""
        return optimal(self.mdp)

    def restricted(self, starts: Sequence[State]) -> ExactWorld:
        """The same world with other tasks."""
        return ExactWorld(self.world, tuple(starts))

    def heuristic(self) -> Array:
        """[S, A]: go to an adjacent goal, avoid adjacent traps, else at random."""
        return self._one_step(open_weight=1.0, trap_weight=0.0)

    def one_step_critic(self) -> Array:
        """[S, A]: what ``refine`` makes of a critic that knows the immediate outcome only.

        Its verdict is good at the goal, bad in a trap and a coin flip elsewhere; the improvement
        step then converges to a policy in proportion to 1 / (1 - P(good)). At its best, with a
        step that takes the greatest value, such a critic yields :meth:`heuristic`.
        """
        return self._one_step(open_weight=2.0, trap_weight=1.0)

    def baselines(self) -> dict[str, float]:
        """Exact success rates of ``uniform``, ``heuristic``, ``one_step_critic``, ``optimal``."""
        policies = {
            "uniform": self.mdp.uniform(),
            "heuristic": self.heuristic(),
            "one_step_critic": self.one_step_critic(),
            "optimal": self.optimum[0],
        }
        return {name: success_rate(self.mdp, policy) for name, policy in policies.items()}

    def _one_step(self, open_weight: float, trap_weight: float) -> Array:
        mdp = self.mdp
        wins = mdp.allowed & (mdp.success > 0)
        trapped = mdp.transition.sum(-1) == 0
        weights = mdp.allowed * np.where(trapped, trap_weight, open_weight)
        # A room whose exits are all trapped leaves no choice.
        weights = np.where(weights.any(-1, keepdims=True), weights, mdp.allowed)
        weights = np.where(wins.any(-1, keepdims=True), wins, weights)
        return weights / weights.sum(-1, keepdims=True)
