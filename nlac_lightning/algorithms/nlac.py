"""Natural Language Actor-Critic (arXiv 2512.04601): a critic that writes teaches a policy.

Each training step takes a batch of transitions from the replay buffer, generates all targets for
it, and makes one gradient step on L1 (critic) and L2 (policy).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from nlac_lightning.algorithms.examples import Example, Teacher, weigh
from nlac_lightning.algorithms.language_critic import CriticTarget, LanguageCritic
from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.warmup import CriticGate, TargetKind, WarmupConfig
from nlac_lightning.critic import Critic, CriticSource
from nlac_lightning.distributed import rank, totals
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.generation.base import Completion
from nlac_lightning.improvement import IMPROVEMENTS, Improve, Improvement, Improver
from nlac_lightning.policy_gradient.tokens import read_tokens
from nlac_lightning.policy_gradient.trajectory import Segment
from nlac_lightning.replay.episode import Transition


class NLAC(LanguageCritic):
    """NLAC with named, swappable parts.

    The defaults are the algorithm of the paper but for the improvement step, where ``advantage``
    learned what ``refine`` could not (docs/learning.md); ``configs/algorithm/nlac_paper.yaml`` is
    the paper's throughout.

    Args:
        improvement: ``refine`` distils every refined action (the paper). ``accept`` distils the
            policy's own action where its critique is good. ``refine_then_accept`` refines what the
            critic calls bad and distils what it then calls good. ``best_of_n`` distils, of ``n``
            actions, the one with the best critique (NLQL). ``advantage`` distils the first of
            ``n`` actions whose score is above their mean: it needs no verdict on how good is good,
            so it also learns where all critiques of a weak policy are bad.
        critic: where critiques come from. ``learned`` is the method; ``oracle`` (the environment
            tells the truth: an upper bound), ``none`` and ``shuffled`` are controls.
        k: futures that the evaluator sees for each action.
        m: iterations of ``refine``.
        n: candidates of ``best_of_n`` and ``advantage``: the base action and fresh samples.
        base_action: the action to improve: ``fresh`` is drawn from the current policy (the paper),
            ``buffer`` is the one that was taken, ``mixed`` takes the buffer's in every second
            state. A policy that never acts right learns from explored actions only through these.
        targets: of the critic once the policy learns: ``td`` bootstraps (the paper), ``outcome``
            describes how the stored episode went on (Monte Carlo, so of older policies; a control).
        loss: see :class:`~nlac_lightning.algorithms.loss_config.LossConfig`.
        warmup: see :class:`~nlac_lightning.algorithms.warmup.WarmupConfig`.
        seed: seed of all sampling in training.
        parts: backbone, roles, optimizer, compute and evaluation; see
            :class:`~nlac_lightning.algorithms.base.Algorithm`.

    Source: arXiv 2512.04601, section 4 and algorithm 1.
    """

    off_policy = True

    def __init__(
        self,
        improvement: Literal[
            "refine", "accept", "refine_then_accept", "best_of_n", "advantage"
        ] = "advantage",
        critic: CriticSource = "learned",
        k: int = 1,
        m: int = 1,
        n: int = 4,
        base_action: Literal["fresh", "buffer", "mixed"] = "fresh",
        targets: TargetKind = "td",
        loss: LossConfig | None = None,
        warmup: WarmupConfig | None = None,
        seed: int = 0,
        **parts: Any,
    ) -> None:
        super().__init__(loss=loss, **parts)
        require_choice("model.improvement", improvement, IMPROVEMENTS)
        require_choice("model.critic", critic, ("learned", "oracle", "none", "shuffled"))
        require_choice("model.base_action", base_action, ("fresh", "buffer", "mixed"))
        require_choice("model.targets", targets, get_args(TargetKind))
        for name, value in (("k", k), ("m", m), ("n", n)):
            require_positive(f"model.{name}", value)
        self.improvement, self.critic_source = improvement, critic
        self.k, self.m, self.n, self.base_action, self.seed = k, m, n, base_action, seed
        self.targets = targets
        warmup = warmup or WarmupConfig()
        if warmup.targets == "best_outcome" and self.loss.discount < 1:
            raise ConfigError(
                "model.warmup.targets",
                "the way to the best return is not kept, so it cannot be discounted",
                "use td or outcome",
            )
        self.gate = CriticGate(warmup)

    def make_critic(self) -> Critic:
        return Critic(self.roles, self.generator, self.critic_source, self.k, self.env)

    def on_fit_start(self) -> None:
        if self.critic_source == "oracle" and self.env is None:
            raise ConfigError("model.critic", "oracle needs an environment", "set data.env")

    def training_step(self, batch: list[Transition], batch_idx: int) -> None:
        """One iteration: targets for the whole batch, then one gradient step."""
        with self.whole(), self.backbone.reading():
            examples, metrics = self._targets(batch, self._seed())
        metrics |= self.optimize(examples)
        metrics["policy_learns"] = float(self.gate.is_open)
        metrics["seconds_targets"] = self.seconds["targets"]
        metrics["seconds_optimize"] = self.seconds["optimize"]
        self.log_step(metrics, len(batch))

    def _targets(
        self, batch: list[Transition], seed: int
    ) -> tuple[list[Example], dict[str, float]]:
        """Generate what is learned from a batch; also returns what is known of it."""
        metrics: dict[str, float] = {}
        targets: list[list[CriticTarget]] = [[] for _ in batch]
        self.critic.played.clear()
        began = time.perf_counter()
        if self.loss.critic_weight > 0:
            kind = self.targets if self.gate.is_open else self.gate.config.targets
            chosen = self._critic_part(len(batch))
            made = self.critic_targets([batch[i] for i in chosen], seed, kind)
            for i, target in zip(chosen, made, strict=True):
                targets[i] = target
        examples = self.critic_examples(batch, targets)
        metrics |= self.gate.observe(self.critic, batch, targets, self.global_step, seed)
        if self.loss.policy_weight > 0 and self.gate.open(self.global_step):
            improvements = self._supported(batch, self.improver()(batch, seed + 3))
            examples += self._policy_examples(batch, improvements)
            metrics |= _improvement_metrics(improvements)
        examples += self._guard_examples(batch)
        self.seconds["targets"] += time.perf_counter() - began
        return examples, metrics

    def _critic_part(self, size: int) -> list[int]:
        """Places in the batch that get a critic target, evenly spread."""
        share = self.loss.critic_share if self.gate.is_open else 1.0
        count = max(1, round(share * size))
        return [i * size // count for i in range(count)]

    def improver(self) -> Improve:
        """The configured improvement step."""
        return Improver(
            self.improvement, self.critic, self.roles, self.base_actions, self.m, self.n
        )

    def base_actions(
        self, states: Sequence[Transition], seed: int, n: int = 1
    ) -> list[list[Completion]]:
        """``n`` actions a ~ pi_theta(. given s) of each state; the first is the base action, the
        buffer's own where so configured."""
        every = {"fresh": 0, "mixed": 2, "buffer": 1}[self.base_action]
        stored = range(0, len(states), every) if every else range(0)
        actions = [[stored_action(s)] if i in stored else [] for i, s in enumerate(states)]
        fresh = [i for i, some in enumerate(actions) for _ in range(n - len(some))]
        prompts = [
            self.roles.prompt("policy", states[i].state_ids, states[i].state_messages)
            for i in fresh
        ]
        for i, drawn in zip(fresh, self._generate("policy", prompts, seed), strict=True):
            actions[i].append(drawn)
        return actions

    def _supported(
        self, batch: Sequence[Transition], improvements: list[Improvement]
    ) -> list[Improvement]:
        """Without targets that hold a token which the base model would hardly ever write."""
        if self.loss.support == 0:
            return improvements
        segments = {}
        for i, (transition, improvement) in enumerate(zip(batch, improvements, strict=True)):
            if improvement.target is not None:
                prompt = self.roles.prompt(
                    "policy", transition.state_ids, transition.state_messages
                )
                segments[i] = Segment(prompt.ids + improvement.target.ids, len(prompt.ids))
        read = read_tokens(
            self.backbone,
            list(segments.values()),
            "base",
            self.compute_config.prefill_pack_tokens,
            1.0,
        )
        for i, logprobs in zip(segments, read, strict=True):
            if float(logprobs.min()) < math.log(self.loss.support):
                improvements[i] = replace(improvements[i], target=None)
                self.counts["unsupported"] += 1
        return improvements

    def _policy_examples(
        self, batch: Sequence[Transition], improvements: Sequence[Improvement]
    ) -> list[Example]:
        """L2 = -log pi_theta(a^r given s), divided by the batch (of all processes), not by what was
        distilled.

        A step that accepts few actions so moves the policy little. All tokens count alike, as in
        the sum of log-likelihoods, which is divided by the actions' mean length: the mean over each
        action's own tokens would teach short actions best.
        """
        lengths = [len(i.target.ids) for i in improvements if i.target is not None]
        size, distilled, tokens = totals(len(batch), len(lengths), sum(lengths))
        share = self.loss.policy_weight * distilled / (size * max(tokens, 1))
        examples = []
        for transition, improvement in zip(batch, improvements, strict=True):
            if improvement.target is not None:
                prompt = self.roles.prompt(
                    "policy", transition.state_ids, transition.state_messages
                )
                ids = prompt.ids + improvement.target.ids
                weight = share * len(improvement.target.ids)
                examples.append(Example("policy", ids, len(prompt.ids), weight=weight))
            else:
                self.counts["nothing_to_distil"] += 1
        return examples

    def _guard_examples(self, batch: Sequence[Transition]) -> list[Example]:
        examples: list[Example] = []
        if self.loss.policy_kl > 0:
            kept = []
            for transition in batch:
                prompt = self.roles.prompt(
                    "policy", transition.state_ids, transition.state_messages
                )
                ids = prompt.ids + transition.turn.action_ids
                kept.append(
                    Example("policy_kl", ids, len(prompt.ids), teacher=Teacher("target", ids))
                )
            examples += weigh(kept, self.loss.policy_kl)
        if self.loss.role_replay > 0:
            kept = [
                Example("role_replay", ids, start, teacher=Teacher("base", ids))
                for ids, start in self.critic.played
            ]
            examples += weigh(kept, self.loss.role_replay)
        return examples

    def _seed(self) -> int:
        """A seed of this step and process alone, so that a resumed run draws the same texts."""
        return (self.seed * 1_000_003 + self.global_step) * 1_000_003 + 17 + rank() * 2**40

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"gate": self.gate.state_dict()}

    def restore_progress(self, state: dict[str, Any]) -> None:
        super().restore_progress(state)
        if "gate" in state:
            self.gate.load_state_dict(state["gate"])


def stored_action(state: Transition) -> Completion:
    """The transition's own action, as it was sampled."""
    turn = state.turn
    reason = "length" if turn.finish_reason == "length" else "stop"
    return Completion(turn.action_ids, turn.completion, turn.logprobs, reason, turn.policy_version)


def _improvement_metrics(improvements: Sequence[Improvement]) -> dict[str, float]:
    """What was said about the actions and what is distilled, as shares of the batch."""
    n = len(improvements)
    verdicts = [improvement.critique.good for improvement in improvements]
    return {
        "critic_says_good": sum(v is True for v in verdicts) / n,
        "critic_unparsable": sum(v is None for v in verdicts) / n,
        "critic_cut_off": sum(not i.critique.complete for i in improvements) / n,
        "distilled": sum(i.target is not None for i in improvements) / n,
        "distilled_refined": sum(
            i.target is not None and i.source == "refinement" for i in improvements
        )
        / n,
    }
