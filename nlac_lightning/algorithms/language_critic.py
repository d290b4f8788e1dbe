"""The language Bellman backup: targets and loss of the successor model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.examples import Example, Teacher, weigh
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.warmup import TargetKind
from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import Prompt


@dataclass(frozen=True)
class CriticTarget:
    """A description that the successor model learns for one transition.

    Attributes:
        ids: the description; its first ``forced`` ids were given, not drawn.
        teacher: the backup prompt followed by ``ids``.
        text: the description in words.
        weight: its share among the transition's targets, which add up to 1.
    """

    ids: tuple[int, ...]
    forced: int
    teacher: tuple[int, ...]
    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class Continuation:
    """How a transition may go on, as the backup is told.

    Attributes:
        reward: what was earned, or the return of all that followed.
        action, description: the next action and the future that is foreseen for it; empty where
            nothing follows.
        weight: its probability.
    """

    reward: float
    action: str = ""
    description: str = ""
    weight: float = 1.0


class LanguageCritic(Algorithm):
    """Base of the algorithms that train a successor model.

    Where the roles name endings, chance is integrated out of the targets: the two endings of a
    foreseen future are two targets, weighted by the probability with which the target model writes
    them, instead of one that was drawn. That is the same expectation with less noise.

    Args:
        loss: see :class:`~nlac_lightning.algorithms.loss_config.LossConfig`.
        parts: see :class:`~nlac_lightning.algorithms.base.Algorithm`.

    Raises:
        ConfigError: a discount or several next actions without ``roles.endings``.

    Source: arXiv 2512.04601, section 4.1.
    """

    target_role = "backup"
    """Who writes the critic's targets; it is the teacher of L1."""

    def __init__(self, loss: LossConfig | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.loss = loss or LossConfig()
        for name in ("discount", "next_actions"):
            if getattr(self.loss, name) != 1 and self.roles_config.endings is None:
                raise ConfigError(
                    f"model.loss.{name}",
                    "it weighs endings, and the roles name none",
                    f"set model.roles.endings, or {name} to 1",
                )

    def critic_targets(
        self, batch: Sequence[Transition], seed: int, kind: TargetKind = "td"
    ) -> list[list[CriticTarget]]:
        """Language Bellman backup of each transition; no target where it was cut off.

        d_t ~ B(r_t, s_{t+1}, a_{t+1}, d_{t+1}) with a_{t+1} ~ pi_theta and d_{t+1} ~ M_theta-bar;
        a terminal transition has nothing to bootstrap and describes the outcome itself. Any other
        ``kind`` takes all transitions as terminal, with a return from there on as the reward:
        Monte-Carlo targets. With ``loss.lower_bound``, ``td`` does so where the best return is
        positive.
        """
        kinds: list[TargetKind] = [
            "best_outcome" if kind == "td" and self.loss.lower_bound and x.best_return > 0 else kind
            for x in batch
        ]
        after = [i for i, x in enumerate(batch) if kinds[i] == "td" and not x.terminal]
        foreseen = dict(zip(after, self._foresee([batch[i] for i in after], seed), strict=True))
        ways = [
            foreseen[i] if i in foreseen else self._known(transition, kinds[i])
            for i, transition in enumerate(batch)
        ]
        owners = [i for i, some in enumerate(ways) for _ in some]
        told = [way for some in ways for way in some]
        prompts = [
            self.roles.prompt(
                "backup",
                batch[i].state_ids,
                batch[i].state_messages,
                action=batch[i].turn.action,
                reward=way.reward,
                replies=" ".join(message["content"] for message in batch[i].turn.replies),
                terminal=i not in foreseen,
                next_action=way.action,
                next_description=way.description,
            )
            for i, way in zip(owners, told, strict=True)
        ]
        drawn = self._generate("backup", prompts, seed + 2)
        targets: list[list[CriticTarget]] = [[] for _ in batch]
        for i, way, prompt, completion in zip(owners, told, prompts, drawn, strict=True):
            target = self.critic_target(prompt, completion, way.weight)
            targets[i] += [target] if target is not None else []
        # one of two endings alone would teach that it is certain
        return [t if len(t) == len(w) else [] for t, w in zip(targets, ways, strict=True)]

    def _foresee(self, batch: Sequence[Transition], seed: int) -> list[list[Continuation]]:
        """Continuations of transitions that are not terminal, by policy and target model."""
        n = self.loss.next_actions
        repeated = [x for x in batch for _ in range(n)]
        said = [_next_messages(x) for x in repeated]
        prompts = [
            self.roles.prompt("policy", x.next_state_ids, messages)
            for x, messages in zip(repeated, said, strict=True)
        ]
        actions = [self.roles.action(c.text) for c in self._generate("policy", prompts, seed)]
        prompts = [
            self.roles.prompt("successor", x.next_state_ids, messages, action=action)
            for x, messages, action in zip(repeated, said, actions, strict=True)
        ]
        futures = self._generate("successor", prompts, seed + 1, adapter="target")
        return [
            self._continuations(x.turn.reward, actions[i : i + n], futures[i : i + n])
            for x, i in zip(batch, range(0, len(repeated), n), strict=True)
        ]

    def _continuations(
        self, reward: float, actions: Sequence[str], futures: Sequence[Completion]
    ) -> list[Continuation]:
        """The first future as it is, or with each ending as likely as all futures make it."""
        scores = [self.roles.ending(future).score for future in futures]
        known = [i for i, score in enumerate(scores) if not math.isnan(score)]
        first = known[0] if known else 0
        text = futures[first].text.strip()
        if not known:
            return [Continuation(reward, actions[first], text)]
        p = self.loss.discount * sum(scores[i] for i in known) / len(known)
        return [
            Continuation(reward, actions[first], self.roles.end_as(text, good), weight)
            for good, weight in ((True, p), (False, 1.0 - p))
            if weight > 0
        ]

    def _known(self, transition: Transition, kind: TargetKind) -> list[Continuation]:
        """What the reward or a stored return says, discounted by the turns until then."""
        if kind == "td":
            return [Continuation(transition.turn.reward)]
        if kind == "best_outcome":
            return [Continuation(transition.best_return)]
        p = self.loss.discount**transition.turns_left if transition.return_to_go > 0 else 1.0
        return [
            Continuation(reward, weight=weight)
            for reward, weight in ((transition.return_to_go, p), (0.0, 1.0 - p))
            if weight > 0
        ]

    def critic_target(
        self, prompt: Prompt, completion: Completion, weight: float = 1.0
    ) -> CriticTarget | None:
        """The target that a backup wrote; None, and counted, if it was cut off or is empty."""
        forced = prompt.ids[len(prompt.ids) - prompt.prefill :]
        text = self.roles.codec.decode(forced) + completion.text
        if not completion.complete or not text.strip():
            self.counts["backup_dropped"] += 1
            return None
        ids = forced + completion.ids
        return CriticTarget(ids, len(forced), prompt.ids + completion.ids, text.strip(), weight)

    def critic_examples(
        self, batch: Sequence[Transition], targets: Sequence[Sequence[CriticTarget]]
    ) -> list[Example]:
        """L1 = KL(B M_theta-bar(. given s, a) || M_theta(. given s, a)) on the targets."""
        teacher = self.roles.settings(self.target_role).adapter
        examples = []
        for transition, some in zip(batch, targets, strict=True):
            prompt = self.roles.prompt(
                "successor",
                transition.state_ids,
                transition.state_messages,
                action=transition.turn.action,
            )
            examples += [
                Example(
                    "critic",
                    prompt.ids + target.ids,
                    len(prompt.ids),
                    target.forced,
                    Teacher(teacher, target.teacher) if self.loss.critic == "kl" else None,
                    target.weight,
                )
                for target in some
            ]
        return weigh(examples, self.loss.critic_weight)

    def _generate(
        self, role: str, prompts: Sequence[Prompt], seed: int, adapter: str | None = None
    ) -> list[Completion]:
        return self.generator.generate(
            [
                self.roles.request(role, prompt, seed + 7919 * i, adapter=adapter)
                for i, prompt in enumerate(prompts)
            ]
        )


def _next_messages(transition: Transition) -> list[Message]:
    own: Message = {"role": "assistant", "content": transition.turn.completion}
    return [*transition.state_messages, own, *transition.turn.replies]
