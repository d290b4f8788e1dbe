"""Exact values of a finite decision process: one linear solve in float64 per policy.

Rewards are 1 for success and 0 otherwise, and time costs nothing by itself, so every value is a
probability of success.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nlac_lightning.errors import ConfigError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class FiniteMDP:
    """An episodic process that ends with or without success.

    Attributes:
        transition: [S, A, S'], probability of going on in S'. What is missing from 1 is the
            probability that the episode ends with this action.
        success: [S, A], probability that it ends with this action and succeeds.
        allowed: [S, A], actions that a sensible policy may take. The others have outcomes too.
        start: [S], distribution of the first state.

    Raises:
        ConfigError: shapes that do not fit, numbers that are no probabilities, or a state in
            which nothing is allowed.
    """

    transition: Array
    success: Array
    allowed: Mask
    start: Array

    def __post_init__(self) -> None:
        states, actions = self.success.shape
        shapes = {
            "transition": (states, actions, states),
            "allowed": (states, actions),
            "start": (states,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise _error(name, f"has shape {getattr(self, name).shape}", f"use {shape}")
        for name in ("transition", "success", "start"):
            if not np.all(getattr(self, name) >= 0):
                raise _error(name, "has entries below 0 or nan", "use probabilities")
        if np.any(self.transition.sum(-1) + self.success > 1 + 1e-9):
            raise _error("transition", "goes on or succeeds with more than 1", "normalise it")
        if abs(self.start.sum() - 1) > 1e-9:
            raise _error("start", f"sums to {self.start.sum()}", "normalise it")
        if not self.allowed.any(-1).all():
            raise _error("allowed", "leaves a state without an action", "allow one in each")

    def uniform(self) -> Array:
        """[S, A], the policy that takes every allowed action alike."""
        return self.allowed / self.allowed.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Values:
    """Probabilities of success: ``q`` [S, A] after an action, ``v`` [S] under the policy."""

    q: Array
    v: Array


def evaluate(mdp: FiniteMDP, policy: Array) -> Values:
    """Exact values of a policy.

    Args:
        mdp: the process.
        policy: [S, A], rows are distributions.

    Raises:
        ConfigError: rows that are no distributions, or a policy under which an episode may never
            end.
    """
    if policy.shape != mdp.success.shape or np.any(policy < 0):
        raise ConfigError("policy", "is no table of probabilities", f"use {mdp.success.shape}")
    if np.any(np.abs(policy.sum(-1) - 1) > 1e-9):
        raise ConfigError("policy", "has rows that do not sum to 1", "normalise them")
    onward = np.einsum("sa,sat->st", policy, mdp.transition)
    reward = (policy * mdp.success).sum(-1)
    try:
        v = np.linalg.solve(np.eye(len(onward)) - onward, reward)
    except np.linalg.LinAlgError as error:
        raise _error("transition", "lets an episode go on for ever", "end it at times") from error
    return Values(mdp.success + mdp.transition @ v, v)


def discounted(mdp: FiniteMDP, policy: Array, discount: float) -> Array:
    """[S, A], a policy's q where a success counts for ``discount`` to the power of the turns left.

    The fixed point of the backup that a critic with ``loss.discount`` learns from. A discount is
    one more chance to fail on each move that goes on: this is :func:`evaluate` of such a process.

    Args:
        mdp, policy: as in :func:`evaluate`.
        discount: in (0, 1], for each turn before the last.
    """
    return evaluate(replace(mdp, transition=discount * mdp.transition), policy).q


def success_rate(mdp: FiniteMDP, policy: Array) -> float:
    """Exact success rate in [0, 1] of a policy from ``mdp.start``."""
    return float(mdp.start @ evaluate(mdp, policy).v)


def occupancy(mdp: FiniteMDP, policy: Array) -> Array:
    """[S], expected number of visits to each state in one episode of a policy."""
    onward = np.einsum("sa,sat->st", policy, mdp.transition)
    return np.linalg.solve(np.eye(len(onward)) - onward.T, mdp.start)


def optimal(mdp: FiniteMDP) -> tuple[Array, Values]:
    """An optimal policy over the allowed actions, with its values.

    By policy iteration, so it is exact. The policy is deterministic.
    """
    choice = mdp.allowed.argmax(-1)
    rows = np.arange(len(choice))
    while True:
        policy = np.zeros_like(mdp.success)
        policy[rows, choice] = 1.0
        values = evaluate(mdp, policy)
        q = np.where(mdp.allowed, values.q, -np.inf)
        # Only a real gain changes an action, or rounding could make ties alternate for ever.
        better = q.max(-1) > q[rows, choice] + 1e-12
        if not better.any():
            return policy, values
        choice = np.where(better, q.argmax(-1), choice)


def greedy(mdp: FiniteMDP, q: Array, tolerance: float = 1e-9) -> Array:
    """[S, A], uniform over the allowed actions whose value is within ``tolerance`` of the best."""
    scores = np.where(mdp.allowed, q, -np.inf)
    best = scores >= scores.max(-1, keepdims=True) - tolerance
    return best / best.sum(-1, keepdims=True)


def _error(name: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(f"mdp.{name}", problem, fix)
