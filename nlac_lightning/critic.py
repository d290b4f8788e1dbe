"""The language critic: futures from the successor model, a critique from the evaluator.

Source: paper, Q_L(s, a) = E(s, a, d_1..d_k) with d_i ~ M_theta(. given s, a).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nlac_lightning.envs.base import OracleCritique, TextEnv
from nlac_lightning.envs.replay import resume, tasks_by_id
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Generator, Request
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.codec import Ids
from nlac_lightning.roles.roles import Roles

CriticSource = Literal["learned", "oracle", "none", "shuffled"]


@dataclass(frozen=True)
class Critique:
    """A language value Q_L(s, a).

    Attributes:
        text: what the evaluator wrote.
        good: its verdict, None where it gives none.
        score: probability in [0, 1] that the action is good, nan where unknown: of the good
            ending, mean over the futures, where endings are named, else of the verdict.
        descriptions: the predicted futures it rests on.
        complete: neither a description nor the critique was cut off.
    """

    text: str
    good: bool | None = None
    score: float = math.nan
    descriptions: tuple[str, ...] = ()
    complete: bool = True


class Critic:
    """Critiques actions in stored states.

    Args:
        roles, generator: prompts and engine.
        source: ``learned`` is the method. ``oracle`` asks the environment (an upper bound),
            ``none`` gives no critique, ``shuffled`` gives each action another one's: controls.
        k: futures per action.
        env: needed by ``oracle``.

    Attributes:
        played: what the online adapter wrote as evaluator and refiner since this was cleared, each
            as prompt and completion ids and where the completion starts.
    """

    def __init__(
        self,
        roles: Roles,
        generator: Generator,
        source: CriticSource = "learned",
        k: int = 1,
        env: TextEnv | None = None,
    ) -> None:
        self.roles, self.generator = roles, generator
        self.source, self.k, self.env = source, k, env
        self.played: list[tuple[Ids, int]] = []
        self._tasks = tasks_by_id(env) if env is not None else {}

    def describe(
        self,
        states: Sequence[Transition],
        actions: Sequence[str],
        seed: int,
        adapter: str | None = None,
        k: int = 1,
    ) -> list[list[Completion]]:
        """``k`` predicted futures of each action, by the successor model."""
        requests = []
        for i, (state, action) in enumerate(zip(states, actions, strict=True)):
            prompt = self.roles.prompt(
                "successor", state.state_ids, state.state_messages, action=action
            )
            for j in range(k):
                requests.append(
                    self.roles.request("successor", prompt, seed + i * k + j, adapter=adapter)
                )
        out = self.generator.generate(requests)
        return [out[i * k : (i + 1) * k] for i in range(len(states))]

    def judge(
        self,
        states: Sequence[Transition],
        actions: Sequence[str],
        descriptions: Sequence[Sequence[str]],
        seed: int,
    ) -> list[Critique]:
        """Critiques that follow from given futures."""
        requests = [
            self.roles.request(
                "evaluator",
                self.roles.prompt(
                    "evaluator",
                    state.state_ids,
                    state.state_messages,
                    action=action,
                    descriptions=list(futures),
                ),
                seed + i,
            )
            for i, (state, action, futures) in enumerate(
                zip(states, actions, descriptions, strict=True)
            )
        ]
        critiques = []
        for out, futures in zip(self._generate(requests), descriptions, strict=True):
            verdict = self.roles.verdict(out)
            critiques.append(
                Critique(
                    out.text.strip(), verdict.good, verdict.score, tuple(futures), out.complete
                )
            )
        return critiques

    def critique(
        self, states: Sequence[Transition], actions: Sequence[str], seed: int
    ) -> list[Critique]:
        """The critique of each action by the configured source."""
        if self.source == "none":
            return [Critique("") for _ in states]
        if self.source == "oracle":
            return [self._oracle(s, a) for s, a in zip(states, actions, strict=True)]
        critiques = self.learned(states, actions, seed)
        if self.source == "shuffled" and len(critiques) > 1:
            # A rotation: a random order would leave some with their own.
            shift = int(np.random.default_rng(seed).integers(1, len(critiques)))
            critiques = critiques[shift:] + critiques[:shift]
        return critiques

    def learned(
        self, states: Sequence[Transition], actions: Sequence[str], seed: int
    ) -> list[Critique]:
        """The model's own critique, whatever the source for training is."""
        futures = self.describe(states, actions, seed, k=self.k)
        texts = [[future.text.strip() for future in some] for some in futures]
        critiques = self.judge(states, actions, texts, seed)
        cut = [any(not future.complete for future in some) for some in futures]
        return [
            replace(c, score=self._score(c, some), complete=c.complete and not short)
            for c, some, short in zip(critiques, futures, cut, strict=True)
        ]

    def _score(self, critique: Critique, futures: Sequence[Completion]) -> float:
        """Mean probability of the good ending: k draws of a verdict tell far less."""
        if self.roles.config.endings is None:
            return critique.score
        known = [p for f in futures if not math.isnan(p := self.roles.ending(f).score)]
        return sum(known) / len(known) if known else math.nan

    def _oracle(self, state: Transition, action: str) -> Critique:
        truth = self.truth(state, action)
        if truth is None:
            raise ConfigError(
                "model.critic",
                f"the environment '{state.env}' has no oracle",
                "use model.critic: learned",
            )
        return Critique(truth.text(), truth.good, float(truth.good))

    def truth(self, state: Transition, action: str) -> OracleCritique | None:
        """The environment's own critique of any action in a stored state, None without one."""
        task = self._tasks.get((state.split, state.task_id))
        if self.env is None or task is None:
            return None
        session = resume(self.env, task, state.seed, state.past_actions)
        try:
            return session.oracle_critique(action)
        finally:
            session.close()

    def refine(
        self,
        states: Sequence[Transition],
        actions: Sequence[str],
        critiques: Sequence[Critique],
        seed: int,
    ) -> list[Completion]:
        """Better actions by the refinement policy, pi_r(. given s, a, Q_L(s, a))."""
        requests = [
            self.roles.request(
                "refinement",
                self.roles.prompt(
                    "refinement",
                    state.state_ids,
                    state.state_messages,
                    action=action,
                    critique=critique.text,
                ),
                seed + i,
            )
            for i, (state, action, critique) in enumerate(
                zip(states, actions, critiques, strict=True)
            )
        ]
        return self._generate(requests)

    def _generate(self, requests: list[Request]) -> list[Completion]:
        completions = self.generator.generate(requests)
        self.played += [
            (request.ids + completion.ids, len(request.ids))
            for request, completion in zip(requests, completions, strict=True)
            if request.adapter == "online"
        ]
        return completions
