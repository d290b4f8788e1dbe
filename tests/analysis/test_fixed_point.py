"""Ceilings on 3-state worlds against a brute-force iteration, and on the language MDP."""

import itertools

import numpy as np
import pytest

from nlac_lightning.analysis import ImprovementStep, fixed_point
from nlac_lightning.analysis.fixed_point import LIMITS
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.solve import FiniteMDP, evaluate, optimal, success_rate
from nlac_lightning.errors import ConfigError

STEPS = (
    ImprovementStep("refine"),
    ImprovementStep("refine", k=3),
    ImprovementStep("refine", k=4, rule="any"),
    ImprovementStep("refine_proportional"),
    ImprovementStep("accept"),
    ImprovementStep("refine_then_accept"),
    ImprovementStep("best_of_n", n=2),
    ImprovementStep("advantage"),
)


def corridor(seed: int = 0) -> FiniteMDP:
    """Three rooms in a row: on, back or into a trap; the last one leads to the goal."""
    transition, success = np.zeros((3, 3, 3)), np.zeros((3, 3))
    for s in range(3):
        on, back, _trap = np.random.default_rng([seed, s]).permutation(3)
        transition[s, back, max(s - 1, 0)] = 0.9
        if s < 2:
            transition[s, on, s + 1] = 0.9
        else:
            success[s, on] = 1.0
    return FiniteMDP(transition, success, np.ones((3, 3), bool), np.array([1.0, 0.0, 0.0]))


def played_values(mdp, policy):
    """Q by following values back for many moves."""
    v, success, transition = [0.0] * 3, mdp.success.tolist(), mdp.transition.tolist()
    for _ in range(300):
        q = [
            [success[s][a] + sum(transition[s][a][t] * v[t] for t in range(3)) for a in range(3)]
            for s in range(3)
        ]
        v = [sum(policy[s][a] * q[s][a] for a in range(3)) for s in range(3)]
    return q, v


def verdict(q, k, rule):
    total = 0.0
    for futures in itertools.product((0, 1), repeat=k):
        if any(futures) if rule == "any" else 2 * sum(futures) > k:
            total += float(np.prod([q if future else 1 - q for future in futures]))
    return total


def distilled(step, p, g):
    """One state's distribution over three actions, by enumeration."""
    mass = [0.0] * 3
    if step.kind == "best_of_n":
        for a, b in itertools.product(range(3), repeat=2):
            mass[a] += p[a] * p[b] * (g[a] + (1 - g[a]) * (1 - g[b]))
            mass[b] += p[a] * p[b] * (1 - g[a]) * g[b]
        return mass
    if step.kind == "advantage":
        mean = sum(p[a] * g[a] for a in range(3))
        mass = [p[a] if g[a] > mean + 1e-12 else 0.0 for a in range(3)]
        return [m / sum(mass) for m in mass] if any(mass) else p
    for a in range(3):
        mass[a] += p[a] * g[a]
        for b in (b for b in range(3) if b != a and step.kind != "accept"):
            proportional = step.kind == "refine_proportional"
            share = p[b] / sum(p[c] for c in range(3) if c != a) if proportional else 0.5
            keep = g[b] if step.kind == "refine_then_accept" else 1.0
            mass[b] += p[a] * (1 - g[a]) * share * keep
    return [m / sum(mass) for m in mass]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_iteration_equals_brute_force(step):
    mdp, policy = corridor(), [[1 / 3] * 3 for _ in range(3)]
    for _ in range(40):
        q, _ = played_values(mdp, policy)
        for s in range(3):
            new = distilled(step, policy[s], [verdict(x, step.k, step.rule) for x in q[s]])
            policy[s] = [0.5 * old + 0.5 * fresh for old, fresh in zip(policy[s], new, strict=True)]
    found = fixed_point(mdp, step, max_iterations=40)
    np.testing.assert_allclose(found.policy, policy, atol=1e-9)
    assert found.success == pytest.approx(played_values(mdp, policy)[1][0], abs=1e-9)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_end_is_a_fixed_point(step):
    mdp = corridor(1)
    found = fixed_point(mdp, step, tolerance=1e-8, closed_form=step.kind in LIMITS)
    assert found.converged
    again = step(found.policy, evaluate(mdp, found.policy).q, mdp.allowed)
    np.testing.assert_allclose(again, found.policy, atol=1e-7)
    assert found.success == success_rate(mdp, found.policy)


@pytest.mark.parametrize("step", [STEPS[0], STEPS[1], STEPS[3]], ids=lambda step: step.name)
def test_closed_forms_end_where_the_steps_do(step):
    mdp = corridor(2)
    slow = fixed_point(mdp, step, tolerance=1e-8)
    fast = fixed_point(mdp, step, tolerance=1e-8, closed_form=True)
    assert slow.converged and fast.converged
    np.testing.assert_allclose(fast.policy, slow.policy, atol=1e-5)
    assert fast.iterations < slow.iterations


def test_refine_with_one_future_is_proportional_to_one_over_one_minus_q_and_below_the_optimum():
    mdp = corridor(3)
    found = fixed_point(mdp, ImprovementStep("refine"), tolerance=1e-11)
    for s in range(2):  # in the last room one action is always good
        flow = found.policy[s] * (1 - found.values.q[s])
        np.testing.assert_allclose(flow, flow[0], atol=1e-9)
    best = success_rate(mdp, optimal(mdp)[0])
    assert found.success < 0.9 * best
    for kind in ("accept", "best_of_n", "advantage"):
        assert fixed_point(mdp, ImprovementStep(kind)).success == pytest.approx(best, abs=1e-6)


def test_the_rate_and_the_start_do_not_move_the_end_of_refine():
    mdp = corridor(4)
    ends = [
        fixed_point(mdp, ImprovementStep("refine"), start=start, rate=rate).success
        for rate, start in ((0.1, None), (0.5, optimal(mdp)[0]), (1.0, None))
    ]
    assert ends == pytest.approx([ends[0]] * 3, abs=1e-7)


def test_the_one_step_critic_of_the_language_mdp_is_the_end_of_refine():
    exact = LanguageMDPEnv(3).exact("test")
    mdp = exact.mdp
    immediate = np.where(mdp.success > 0, 1.0, np.where(mdp.transition.sum(-1) > 0, 0.5, 0.0))
    found = fixed_point(mdp, ImprovementStep("refine"), critic=immediate)
    assert found.success == pytest.approx(exact.baselines()["one_step_critic"], abs=1e-6)


def test_a_run_that_is_cut_says_so_and_settings_are_checked():
    mdp = corridor()
    assert not fixed_point(mdp, ImprovementStep("accept"), max_iterations=3).converged
    with pytest.raises(ConfigError, match=r"analysis\.rate"):
        fixed_point(mdp, ImprovementStep(), rate=1.5)
    with pytest.raises(ConfigError, match=r"analysis\.closed_form"):
        fixed_point(mdp, ImprovementStep("accept"), closed_form=True)
    for field, value in {"kind": "guess", "rule": "most", "k": 0, "n": 0}.items():
        with pytest.raises(ConfigError, match=rf"analysis\.{field}"):
            ImprovementStep(**{field: value})
