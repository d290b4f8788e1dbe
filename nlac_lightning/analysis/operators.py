"""Improvement steps as maps of a policy, exact in expectation over verdicts and samples.

Throughout, ``policy`` [S, A] has rows that are distributions, ``good`` [S, A] is the probability
that the critique of an action says good, and ``allowed`` [S, A] holds the actions that a refiner
may propose. A step returns the distribution of the action that it distils, given that there is one.
"""

from __future__ import annotations

from math import comb
from typing import Protocol

import numpy as np

from nlac_lightning.envs.language_mdp.solve import Array, Mask
from nlac_lightning.errors import require_choice, require_positive

VERDICT_RULES = ("majority", "any")


def verdict_probability(q: Array, k: int = 1, rule: str = "majority") -> Array:
    """Probability that a verdict over ``k`` futures is good, each a success with probability ``q``.

    Args:
        q: probabilities in [0, 1], of any shape.
        k: number of independent futures, 1 or more.
        rule: ``majority`` (more than half of them succeed) or ``any`` (at least one does).

    Raises:
        ConfigError: ``k`` or ``rule`` is out of range.
    """
    require_positive("analysis.k", k)
    require_choice("analysis.rule", rule, VERDICT_RULES)
    q = np.clip(q, 0.0, 1.0)
    if rule == "any":
        return 1.0 - (1.0 - q) ** k
    enough = range(k // 2 + 1, k + 1)
    return np.sum([comb(k, i) * q**i * (1.0 - q) ** (k - i) for i in enough], axis=0)


class Operator(Protocol):
    """One improvement step; see the module for its arguments."""

    def __call__(self, policy: Array, good: Array, allowed: Mask) -> Array:
        """[S, A], the distribution of the distilled action."""
        ...


def refine(policy: Array, good: Array, allowed: Mask) -> Array:
    """A good action is kept, a bad one replaced by another allowed one at random.

    See :func:`refine_limit` for where it ends.
    """
    return policy * good + _another(policy * (1.0 - good), allowed)


def refine_limit(policy: Array, good: Array, allowed: Mask) -> Array:
    """Where :func:`refine` ends for fixed verdicts: in proportion to ``1 / (1 - good)``.

    As much mass leaves an action, ``policy * (1 - good)``, as comes back, and that is the same for
    all. Actions that are always good take everything.
    """
    sure = allowed & (good >= 1.0)
    weights = allowed / np.where(good < 1.0, 1.0 - good, 1.0)
    weights = np.where(sure.any(-1, keepdims=True), sure, weights)
    return weights / weights.sum(-1, keepdims=True)


def refine_proportional(policy: Array, good: Array, allowed: Mask) -> Array:
    """Like :func:`refine`, but the other action is drawn in proportion to the policy.

    An action that is the policy's only one has no other and is kept.
    """
    policy = np.where(allowed, policy, 0.0)
    bad = policy * (1.0 - good)
    rest = policy.sum(-1, keepdims=True) - policy
    share = np.divide(bad, rest, out=np.zeros_like(bad), where=rest > 0)
    moved = policy * (share.sum(-1, keepdims=True) - share)
    return policy * good + moved + np.where(rest > 0, 0.0, bad)


def refine_proportional_limit(policy: Array, good: Array, allowed: Mask) -> Array:
    """Where :func:`refine_proportional` ends for fixed verdicts, from inside the simplex.

    With ``n`` actions left, ``1 - policy`` is proportional to ``1 - good``; an action for which
    that leaves no mass dies out, and the rest share among themselves.
    """
    bad = 1.0 - good
    left = allowed
    for _ in range(allowed.shape[-1]):
        others = left.sum(-1, keepdims=True) - 1
        total = np.where(left, bad, 0.0).sum(-1, keepdims=True)
        share = 1.0 - others * bad / np.where(total > 0, total, 1.0)
        left = left & ((share > 0) | (total <= 0))
    return np.where(left, share, 0.0) / np.where(left, share, 0.0).sum(-1, keepdims=True)


def accept(policy: Array, good: Array, allowed: Mask) -> Array:
    """The policy's own action if it is good, else nothing."""
    return _normalised(policy * good, policy)


def refine_then_accept(policy: Array, good: Array, allowed: Mask) -> Array:
    """A bad action is replaced as in :func:`refine`, and then only a good one is distilled."""
    again = _another(policy * (1.0 - good), allowed)
    return _normalised((policy + again) * good, policy)


def advantage(policy: Array, q: Array, allowed: Mask) -> Array:
    """The policy's own action if it is better than the policy is on average, else nothing.

    ``q`` [S, A] are the critic's scores, since no verdict decides. With many candidates, the
    step of ``n`` candidates tends to this. Where no action is better than the others nothing is
    learned.
    """
    policy = np.where(allowed, policy, 0.0)
    mass = policy.sum(-1, keepdims=True)
    mean = (policy * q).sum(-1, keepdims=True) / np.where(mass > 0, mass, 1.0)
    return _normalised(policy * (q > mean + 1e-12), policy)


class BestOfN:
    """``n`` samples of the policy, each judged once; a good one at random, or any if all are bad.

    Args:
        n: number of samples, 1 or more.
    """

    def __init__(self, n: int = 4) -> None:
        require_positive("analysis.n", n)
        self.n = n

    def __call__(self, policy: Array, good: Array, allowed: Mask) -> Array:
        hit, miss = policy * good, policy * (1.0 - good)
        all_bad = np.clip(miss.sum(-1, keepdims=True), 0.0, 1.0) ** self.n
        return (1.0 - all_bad) * _normalised(hit, policy) + all_bad * _normalised(miss, policy)


def _another(mass: Array, allowed: Mask) -> Array:
    """Move each action's mass to the other allowed ones in equal parts; stay where none is."""
    others = allowed.sum(-1, keepdims=True) - allowed
    share = np.divide(mass, others, out=np.zeros_like(mass), where=others > 0)
    moved = np.where(allowed, share.sum(-1, keepdims=True) - share, 0.0)
    return moved + np.where(others > 0, 0.0, mass)


def _normalised(weights: Array, fallback: Array) -> Array:
    """Rows that sum to 1; where there is no weight at all nothing is learned."""
    total = weights.sum(-1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), fallback)
