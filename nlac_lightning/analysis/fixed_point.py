"""The ceiling of an improvement step: iterate it with the exact values of the policy so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nlac_lightning.analysis.operators import (
    VERDICT_RULES,
    BestOfN,
    Operator,
    accept,
    advantage,
    refine,
    refine_limit,
    refine_proportional,
    refine_proportional_limit,
    refine_then_accept,
    verdict_probability,
)
from nlac_lightning.envs.language_mdp.solve import Array, FiniteMDP, Mask, Values, evaluate
from nlac_lightning.errors import ConfigError, require_choice, require_positive

OPERATORS: dict[str, Operator] = {
    "refine": refine,
    "refine_proportional": refine_proportional,
    "accept": accept,
    "refine_then_accept": refine_then_accept,
}
LIMITS: dict[str, Operator] = {
    "refine": refine_limit,
    "refine_proportional": refine_proportional_limit,
}
KINDS = (*OPERATORS, "best_of_n", "advantage")


@dataclass(frozen=True)
class ImprovementStep:
    """A named improvement step with its critic's settings.

    Args:
        kind: one of :data:`KINDS`.
        k: futures behind each verdict; more make verdicts surer.
        rule: ``majority`` or ``any`` of the futures must succeed for a good verdict.
        n: candidates of ``best_of_n``.

    Raises:
        ConfigError: a setting that is out of range.
    """

    kind: str = "refine"
    k: int = 1
    rule: str = "majority"
    n: int = 4

    def __post_init__(self) -> None:
        require_choice("analysis.kind", self.kind, KINDS)
        require_choice("analysis.rule", self.rule, VERDICT_RULES)
        require_positive("analysis.k", self.k)
        require_positive("analysis.n", self.n)

    @property
    def name(self) -> str:
        """What tables call it, as ``refine, majority of 3``."""
        kind = f"best of {self.n}" if self.kind == "best_of_n" else self.kind
        return kind if self.k == 1 else f"{kind}, {self.rule} of {self.k}"

    def __call__(self, policy: Array, q: Array, allowed: Mask) -> Array:
        """[S, A], the distribution that is distilled when the critic knows ``q`` [S, A]."""
        if self.kind == "advantage":
            return advantage(policy, q, allowed)
        operator = BestOfN(self.n) if self.kind == "best_of_n" else OPERATORS[self.kind]
        return operator(policy, verdict_probability(q, self.k, self.rule), allowed)

    def limit(self, policy: Array, q: Array, allowed: Mask) -> Array:
        """[S, A], where repeating the step ends under a critic that keeps to ``q``."""
        if self.kind not in LIMITS:
            raise ConfigError(
                "analysis.closed_form",
                f"'{self.kind}' has none",
                f"leave it off, or use one of {', '.join(LIMITS)}",
            )
        return LIMITS[self.kind](policy, verdict_probability(q, self.k, self.rule), allowed)


@dataclass(frozen=True)
class FixedPoint:
    """Where the iteration ended.

    Attributes:
        policy: [S, A].
        values: its exact values.
        success: its exact success rate in [0, 1] from the start distribution.
        iterations: steps taken.
        converged: whether the last step would have moved no entry by more than the tolerance.
    """

    policy: Array
    values: Values
    success: float
    iterations: int
    converged: bool


def fixed_point(
    mdp: FiniteMDP,
    step: ImprovementStep,
    start: Array | None = None,
    rate: float = 0.5,
    tolerance: float = 1e-9,
    max_iterations: int = 20_000,
    closed_form: bool = False,
    critic: Array | None = None,
) -> FixedPoint:
    """Iterate ``policy <- (1 - rate) * policy + rate * step(policy, Q of policy)``.

    Args:
        mdp: the world.
        step: what is iterated.
        start: [S, A] first policy; uniform over the allowed actions by default.
        rate: share of the new distribution in (0, 1]. It does not move the fixed point; below 1
            it keeps two actions that are both bad from swapping their mass for ever.
        tolerance: largest change of any entry of the policy, per unit of rate, that counts as none.
        max_iterations: where to give up; ``converged`` tells.
        closed_form: jump at once to where the step would end under the present critic, known for
            ``refine`` and ``refine_proportional``. Same fixed point, far fewer iterations where
            nearly every verdict is good.
        critic: [S, A] values in [0, 1] of a critic that does not follow the policy; exact values of
            the present policy by default.

    Raises:
        ConfigError: a setting is out of range.
    """
    require_positive("analysis.rate", rate)
    require_positive("analysis.tolerance", tolerance)
    require_positive("analysis.max_iterations", max_iterations)
    if rate > 1:
        raise ConfigError("analysis.rate", f"{rate} is above 1", "use a share in (0, 1]")
    policy = mdp.uniform() if start is None else start
    improve = step.limit if closed_form else step
    converged, iterations = False, 0
    while not converged and iterations < max_iterations:
        q = evaluate(mdp, policy).q if critic is None else critic
        change = improve(policy, q, mdp.allowed) - policy
        policy = _rows(policy + rate * change)
        iterations += 1
        converged = bool(np.abs(change).max() < tolerance)
    values = evaluate(mdp, policy)
    return FixedPoint(policy, values, float(mdp.start @ values.v), iterations, converged)


def _rows(policy: Array) -> Array:
    """Undo rounding, which thousands of steps would add up."""
    policy = np.maximum(policy, 0.0)
    return policy / policy.sum(-1, keepdims=True)
