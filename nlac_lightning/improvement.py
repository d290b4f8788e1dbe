"""Improvement steps: from a state to the action that the policy should learn there.

``refine`` is the paper's. The others differ in what they trust: ``accept`` only the critic's
verdict, ``refine_then_accept`` the refiner where the critic agrees, ``best_of_n`` the critic's
ranking of samples (NLQL), ``advantage`` its comparison of an action with the policy's others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nlac_lightning.critic import Critic, Critique
from nlac_lightning.errors import require_choice
from nlac_lightning.generation.base import Completion
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import Roles

IMPROVEMENTS = ("refine", "accept", "refine_then_accept", "best_of_n", "advantage")


@dataclass(frozen=True)
class Improvement:
    """What one state yields.

    Attributes:
        target: the completion to distil, or None where the step has nothing to teach.
        source: ``policy`` or ``refinement``, where the target comes from.
        action: the base action that was judged.
        critique: its critique.
        refined: the refined action, if one was made.
    """

    target: Completion | None
    source: str
    action: str
    critique: Critique
    refined: str | None = None


class Sampler(Protocol):
    """Draws actions a ~ pi_theta."""

    def __call__(
        self, states: Sequence[Transition], seed: int, n: int = 1
    ) -> list[list[Completion]]:
        """``n`` candidates for each state, the base action first."""
        ...


Improve = Callable[[Sequence[Transition], int], list[Improvement]]
"""An improvement step: states and a seed to one improvement per state."""


@dataclass(frozen=True)
class Improver:
    """Runs an improvement step.

    Args:
        kind: one of :data:`IMPROVEMENTS`.
        critic: source of critiques and refinements.
        roles: reads actions from completions.
        sample: draws base actions.
        m: how often ``refine`` is iterated.
        n: candidates of ``best_of_n`` and ``advantage``.
    """

    kind: str
    critic: Critic
    roles: Roles
    sample: Sampler
    m: int = 1
    n: int = 4

    def __post_init__(self) -> None:
        require_choice("model.improvement", self.kind, IMPROVEMENTS)

    def __call__(self, states: Sequence[Transition], seed: int) -> list[Improvement]:
        """Improve every state; equal seeds give equal results."""
        if self.kind == "best_of_n":
            return self._best_of_n(states, seed)
        if self.kind == "advantage":
            return self._advantage(states, seed)
        base = [completion for (completion,) in self.sample(states, seed)]
        actions = [self.roles.action(completion.text) for completion in base]
        critiques = self.critic.critique(states, actions, seed)
        if self.kind == "accept":
            blind = self.critic.source == "none"  # the control without a critic accepts all
            return [
                Improvement(whole(c) if _approved(q) or blind else None, "policy", a, q)
                for c, a, q in zip(base, actions, critiques, strict=True)
            ]
        if self.kind == "refine":
            return self._refine(states, actions, critiques, seed)
        return self._refine_then_accept(states, base, actions, critiques, seed)

    def _refine(
        self,
        states: Sequence[Transition],
        actions: list[str],
        critiques: list[Critique],
        seed: int,
    ) -> list[Improvement]:
        refined, current, judged = [], actions, critiques
        for iteration in range(self.m):
            if iteration:
                judged = self.critic.critique(states, current, seed + iteration)
            refined = self.critic.refine(states, current, judged, seed + iteration)
            current = [self.roles.action(completion.text) for completion in refined]
        return [
            Improvement(whole(c), "refinement", a, q, r)
            for c, a, q, r in zip(refined, actions, critiques, current, strict=True)
        ]

    def _refine_then_accept(
        self,
        states: Sequence[Transition],
        base: list[Completion],
        actions: list[str],
        critiques: list[Critique],
        seed: int,
    ) -> list[Improvement]:
        results = [
            Improvement(whole(c), "policy", a, q)
            for c, a, q in zip(base, actions, critiques, strict=True)
        ]
        bad = [i for i, critique in enumerate(critiques) if not _approved(critique)]
        if not bad:
            return results
        some = [states[i] for i in bad]
        refined = self.critic.refine(
            some, [actions[i] for i in bad], [critiques[i] for i in bad], seed
        )
        texts = [self.roles.action(completion.text) for completion in refined]
        again = self.critic.critique(some, texts, seed + 1)
        for i, completion, text, critique in zip(bad, refined, texts, again, strict=True):
            target = whole(completion) if _approved(critique) else None
            results[i] = Improvement(target, "refinement", actions[i], critiques[i], text)
        return results

    def _best_of_n(self, states: Sequence[Transition], seed: int) -> list[Improvement]:
        repeated = [state for state in states for _ in range(self.n)]
        base = [c for candidates in self.sample(states, seed, self.n) for c in candidates]
        actions = [self.roles.action(completion.text) for completion in base]
        critiques = self.critic.critique(repeated, actions, seed)
        results = []
        for i in range(0, len(repeated), self.n):
            # A cut-off sample teaches nothing, so the best of the whole ones is taken.
            best = max(
                range(i, i + self.n),
                key=lambda j: (whole(base[j]) is not None, _rank(critiques[j])),
            )
            results.append(Improvement(whole(base[best]), "policy", actions[best], critiques[best]))
        return results

    def _advantage(self, states: Sequence[Transition], seed: int) -> list[Improvement]:
        """Whatever beats the candidates' mean is distilled as often as it is drawn first."""
        base = self.sample(states, seed, self.n)
        actions = [[self.roles.action(c.text) for c in candidates] for candidates in base]
        # Equal actions are judged once, or the critic's chance would tell them apart.
        asked = [(i, action) for i, some in enumerate(actions) for action in dict.fromkeys(some)]
        judged = self.critic.critique([states[i] for i, _ in asked], [a for _, a in asked], seed)
        known = dict(zip(asked, judged, strict=True))
        results = []
        for i, (candidates, texts) in enumerate(zip(base, actions, strict=True)):
            critiques = [known[i, text] for text in texts]
            chosen = self._above_mean(candidates, critiques)
            target = None if chosen is None else whole(candidates[chosen])
            results.append(
                Improvement(target, "policy", texts[chosen or 0], critiques[chosen or 0])
            )
        return results

    def _above_mean(
        self, candidates: Sequence[Completion], critiques: Sequence[Critique]
    ) -> int | None:
        """The first whole candidate that is better than the policy's are on average.

        The first, not the best: a noisy critic's greatest score is often its greatest error.
        """
        if self.critic.source == "none":  # the control without a critic takes what comes first
            return 0
        scores = [_rank(critique) for critique in critiques]
        bar = sum(scores) / len(scores) + 1e-6
        good = (j for j, score in enumerate(scores) if score > bar)
        return next((j for j in good if whole(candidates[j]) is not None), None)


def whole(completion: Completion) -> Completion | None:
    """A cut-off or empty completion is never distilled as if it were a whole action."""
    return completion if completion.complete and completion.text.strip() else None


def _approved(critique: Critique) -> bool:
    """A verdict on a future that was cut off before its end decides nothing."""
    return critique.good is True and critique.complete


def _rank(critique: Critique) -> float:
    """The score, one half where there is none that counts."""
    known = critique.complete and critique.score == critique.score
    return critique.score if known else 0.5
