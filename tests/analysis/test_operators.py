"""Improvement steps against the enumeration of all that can happen in them."""

import itertools

import numpy as np
import pytest

from nlac_lightning.analysis.operators import (
    BestOfN,
    accept,
    advantage,
    refine,
    refine_limit,
    refine_proportional,
    refine_proportional_limit,
    refine_then_accept,
    verdict_probability,
)
from nlac_lightning.errors import ConfigError

ALLOWED = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]], dtype=bool)
FULL, TWO, ONE = 1, 2, 3


def case(seed):
    rng = np.random.default_rng(seed)
    policy = rng.random(ALLOWED.shape) * ALLOWED
    return policy / policy.sum(-1, keepdims=True), rng.random(ALLOWED.shape)


@pytest.mark.parametrize(
    ("k", "rule"), [(1, "majority"), (3, "majority"), (4, "any"), (4, "majority")]
)
def test_verdicts_count_all_outcomes_of_the_futures(k, rule):
    for q in (0.0, 0.2, 0.5, 0.9, 1.0):
        total = 0.0
        for futures in itertools.product((0, 1), repeat=k):
            good = sum(futures) > k / 2 if rule == "majority" else any(futures)
            total += good * float(np.prod([q if f else 1 - q for f in futures]))
        assert verdict_probability(np.array(q), k, rule) == pytest.approx(total, abs=1e-12)


def test_verdict_settings_are_checked():
    with pytest.raises(ConfigError, match="k"):
        verdict_probability(np.zeros(1), 0)
    with pytest.raises(ConfigError, match="rule"):
        verdict_probability(np.zeros(1), 1, "most")


def others(actions, action, policy=None):
    """The actions that a refiner may propose instead, with their probabilities."""
    rest = [b for b in actions if b != action]
    if not rest:
        return {action: 1.0}
    weights = {b: 1.0 if policy is None else policy[b] for b in rest}
    return {b: weight / sum(weights.values()) for b, weight in weights.items()}


def outcomes(kind, policy, good, actions):
    """(probability, distilled action or None) of everything that can happen in one state."""
    for a in actions:
        p, g = policy[a], good[a]
        if kind == "advantage":
            above = g > sum(policy[b] * good[b] for b in actions)
            # a single action is the mean, and where nothing is above it the policy stays
            yield p, a if above or len(actions) == 1 else None
            continue
        if kind == "accept":
            yield p * g, a
            yield p * (1 - g), None
            continue
        yield p * g, a
        for b, share in others(
            actions, a, policy if kind == "refine_proportional" else None
        ).items():
            if kind == "refine_then_accept":
                yield p * (1 - g) * share * good[b], b
                yield p * (1 - g) * share * (1 - good[b]), None
            else:
                yield p * (1 - g) * share, b


def best_of_n(policy, good, actions, n):
    for drawn in itertools.product(actions, repeat=n):
        for verdicts in itertools.product((True, False), repeat=n):
            p = 1.0
            for a, verdict in zip(drawn, verdicts, strict=True):
                p *= policy[a] * (good[a] if verdict else 1 - good[a])
            # As max() does: the first of the best.
            yield p, drawn[verdicts.index(True) if True in verdicts else 0]


def distribution(events, size):
    mass = np.zeros(size)
    for p, action in events:
        if action is not None:
            mass[action] += p
    return mass / mass.sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("refine", refine),
        ("refine_proportional", refine_proportional),
        ("accept", accept),
        ("advantage", advantage),
        ("refine_then_accept", refine_then_accept),
        ("best_of_n", BestOfN(3)),
    ],
)
def test_steps_equal_their_enumeration(kind, operator, seed):
    policy, good = case(seed)
    result = operator(policy, good, ALLOWED)
    for s, allowed in enumerate(ALLOWED):
        actions = list(np.flatnonzero(allowed))
        events = (
            best_of_n(policy[s], good[s], actions, 3)
            if kind == "best_of_n"
            else outcomes(kind, policy[s], good[s], actions)
        )
        np.testing.assert_allclose(result[s], distribution(events, len(allowed)), atol=1e-12)


@pytest.mark.parametrize("operator", [accept, refine_then_accept, BestOfN(4)])
def test_where_nothing_is_ever_good_nothing_is_learned(operator):
    policy, good = case(0)
    np.testing.assert_allclose(operator(policy, good * 0, ALLOWED), policy, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("step", "limit"),
    [(refine, refine_limit), (refine_proportional, refine_proportional_limit)],
)
def test_limits_are_where_repeating_the_step_ends(step, limit, seed):
    policy, good = case(seed)
    good[FULL, :2] = (0.05, 0.9)  # unlike enough that an action may die out
    policy = ALLOWED / ALLOWED.sum(-1, keepdims=True)
    end = limit(policy, good, ALLOWED)
    for _ in range(4_000):
        policy = 0.5 * policy + 0.5 * step(policy, good, ALLOWED)
    np.testing.assert_allclose(end, policy, atol=1e-5)
    np.testing.assert_allclose(step(end, good, ALLOWED), end, atol=1e-9)


def test_refining_with_one_future_ends_in_proportion_to_one_over_the_chance_of_bad():
    _, good = case(1)
    start = ALLOWED / ALLOWED.sum(-1, keepdims=True)
    end = refine_limit(start, good, ALLOWED)
    for s, allowed in enumerate(ALLOWED):
        flow = end[s, allowed] * (1 - good[s, allowed])
        np.testing.assert_allclose(flow, flow[0], atol=1e-12)


@pytest.mark.parametrize("limit", [refine_limit, refine_proportional_limit])
def test_actions_that_are_always_good_take_everything(limit):
    start = ALLOWED / ALLOWED.sum(-1, keepdims=True)
    good = np.full(ALLOWED.shape, 0.3)
    good[FULL, 2] = good[TWO, 1] = good[TWO, 3] = good[ONE, 2] = 1.0
    end = limit(start, good, ALLOWED)
    np.testing.assert_allclose(end[FULL], [0, 0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(end[TWO], [0, 0.5, 0, 0.5], atol=1e-12)
    np.testing.assert_allclose(end[ONE], [0, 0, 1, 0], atol=1e-12)


def test_advantage_learns_nothing_where_all_is_alike():
    policy, _ = case(0)
    np.testing.assert_array_equal(advantage(policy, np.full(ALLOWED.shape, 0.3), ALLOWED), policy)
