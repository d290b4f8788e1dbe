"""Natural Language Actor-Critic (arXiv 2512.04601): a critic that writes teaches a policy.

Each training step takes a batch of transitions from the replay buffer, generates all targets for
it, and makes one gradient step on L1 (critic) and L2 (policy).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.examples import Example, Teacher, weigh
from nlac_lightning.algorithms.warmup import CriticGate, TargetKind, WarmupConfig
from nlac_lightning.critic import Critic, CriticSource
from nlac_lightning.distributed import rank, totals
from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.generation.base import Completion
from nlac_lightning.improvement import IMPROVEMENTS, Improve, Improvement, Improver
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import Prompt


@dataclass
class LossConfig:
    """The two losses of the paper and two guards against forgetting."""

    critic: Literal["kl", "nll"] = "kl"
    """L1 per token: ``kl`` matches the teacher's whole distribution, ``nll`` its sample."""
    critic_weight: float = 1.0
    """Weight of L1."""
    critic_share: float = 1.0
    """Share of a batch that gets a critic target once the policy learns, above 0 and at most 1.
    Backups are the dearest part of a step; a warmed-up critic needs fewer of them."""
    lower_bound: bool = False
    """A state and action from which some episode in the buffer earned a positive return is
    described by that outcome, not bootstrapped: what was reached once is a lower bound of what can
    be (self-imitation, arXiv 1806.05635). A policy that still fails would otherwise teach the
    critic that nothing works. For environments without chance; false is the paper's."""
    policy_weight: float = 1.0
    """Weight of L2."""
    policy_kl: float = 0.0
    """Weight of KL(target policy || policy) on the batch's actions; protects the policy from the
    critic's updates, since both are one adapter. 0.1 to 1 is usual, 0 is the paper's."""
    role_replay: float = 0.0
    """Weight of KL(frozen base || model) on this step's evaluator and refinement answers, where
    the online adapter plays these roles; keeps them from drifting. 0 is the paper's."""

    def __post_init__(self) -> None:
        require_choice("model.loss.critic", self.critic, ("kl", "nll"))
        for name in ("critic_weight", "policy_weight", "policy_kl", "role_replay"):
            require_positive(f"model.loss.{name}", getattr(self, name), zero=True)
        require_positive("model.loss.critic_share", self.critic_share)
        require_positive("model.loss.critic_share", 1 - self.critic_share, zero=True)
        if self.critic_weight == 0 and self.policy_weight == 0:
            raise ConfigError("model.loss", "both weights are 0", "give critic or policy a weight")


@dataclass(frozen=True)
class CriticTarget:
    """A generated target of the language Bellman backup for one transition.

    Attributes:
        ids: the description; its first ``forced`` ids were given, not drawn.
        teacher: the backup prompt followed by ``ids``.
        text: the description in words.
    """

    ids: tuple[int, ...]
    forced: int
    teacher: tuple[int, ...]
    text: str


class NLAC(Algorithm):
    """NLAC with named, swappable parts. The defaults are the algorithm of the paper.

    Args:
        improvement: ``refine`` distils every refined action (the paper). ``accept`` distils the
            policy's own action where its critique is good. ``refine_then_accept`` refines what the
            critic calls bad and distils what it then calls good. ``best_of_n`` distils, of ``n``
            actions, the one with the best critique (NLQL).
        critic: where critiques come from. ``learned`` is the method; ``oracle`` (the environment
            tells the truth: an upper bound), ``none`` and ``shuffled`` are controls.
        k: futures that the evaluator sees for each action.
        m: iterations of ``refine``.
        n: candidates of ``best_of_n``: the base action and fresh samples.
        base_action: the action to improve: ``fresh`` is drawn from the current policy (the paper),
            ``buffer`` is the one that was taken, ``mixed`` takes the buffer's in every second
            state. A policy that never acts right learns from explored actions only through these.
        targets: of the critic once the policy learns: ``td`` bootstraps (the paper), ``outcome``
            describes how the stored episode went on (Monte Carlo, so of older policies; a control).
        loss: see :class:`LossConfig`.
        warmup: see :class:`~nlac_lightning.algorithms.warmup.WarmupConfig`.
        seed: seed of all sampling in training.
        parts: backbone, roles, optimizer, compute and evaluation; see :class:`Algorithm`.

    Source: arXiv 2512.04601, section 4 and algorithm 1.
    """

    off_policy = True
    target_role = "backup"
    """Who writes the critic's targets; it is the teacher of L1."""

    def __init__(
        self,
        improvement: Literal["refine", "accept", "refine_then_accept", "best_of_n"] = "refine",
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
        super().__init__(**parts)
        require_choice("model.improvement", improvement, IMPROVEMENTS)
        require_choice("model.critic", critic, ("learned", "oracle", "none", "shuffled"))
        require_choice("model.base_action", base_action, ("fresh", "buffer", "mixed"))
        require_choice("model.targets", targets, get_args(TargetKind))
        for name, value in (("k", k), ("m", m), ("n", n)):
            require_positive(f"model.{name}", value)
        self.improvement, self.critic_source = improvement, critic
        self.k, self.m, self.n, self.base_action, self.seed = k, m, n, base_action, seed
        self.targets = targets
        self.loss = loss or LossConfig()
        self.gate = CriticGate(warmup or WarmupConfig())

    def make_critic(self) -> Critic:
        return Critic(self.roles, self.generator, self.critic_source, self.k, self.env)

    def on_fit_start(self) -> None:
        if self.critic_source == "oracle" and self.env is None:
            raise ConfigError("model.critic", "oracle needs an environment", "set data.env")

    def training_step(self, batch: list[Transition], batch_idx: int) -> None:
        """One iteration: targets for the whole batch, then one gradient step."""
        with self.whole():
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
        targets: list[CriticTarget | None] = [None] * len(batch)
        self.critic.played.clear()
        began = time.perf_counter()
        if self.loss.critic_weight > 0:
            kind = self.targets if self.gate.is_open else self.gate.config.targets
            chosen = self._critic_part(len(batch))
            made = self.critic_targets([batch[i] for i in chosen], seed, kind)
            for i, target in zip(chosen, made, strict=True):
                targets[i] = target
        examples = self._critic_examples(batch, targets)
        metrics |= self.gate.observe(self.critic, batch, targets, self.global_step, seed)
        if self.loss.policy_weight > 0 and self.gate.open(self.global_step):
            improvements = self.improver()(batch, seed + 3)
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

    def critic_targets(
        self, batch: Sequence[Transition], seed: int, kind: TargetKind = "td"
    ) -> list[CriticTarget | None]:
        """Language Bellman backup of each transition; None where it was cut off.

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
        messages = {i: _next_messages(batch[i]) for i in after}
        prompts = [self.roles.prompt("policy", batch[i].next_state_ids, messages[i]) for i in after]
        actions = [self.roles.action(c.text) for c in self._generate("policy", prompts, seed)]
        prompts = [
            self.roles.prompt("successor", batch[i].next_state_ids, messages[i], action=action)
            for i, action in zip(after, actions, strict=True)
        ]
        futures = self._generate("successor", prompts, seed + 1, adapter="target")
        follows = {
            i: (action, future.text.strip())
            for i, action, future in zip(after, actions, futures, strict=True)
        }
        backups = []
        for i, transition in enumerate(batch):
            next_action, description = follows.get(i, ("", ""))
            backups.append(
                self.roles.prompt(
                    "backup",
                    transition.state_ids,
                    transition.state_messages,
                    action=transition.turn.action,
                    reward=_reward(transition, kinds[i]),
                    replies=" ".join(message["content"] for message in transition.turn.replies),
                    terminal=i not in follows,
                    next_action=next_action,
                    next_description=description,
                )
            )
        drawn = self._generate("backup", backups, seed + 2)
        return [self._critic_target(p, c) for p, c in zip(backups, drawn, strict=True)]

    def _critic_target(self, prompt: Prompt, completion: Completion) -> CriticTarget | None:
        forced = prompt.ids[len(prompt.ids) - prompt.prefill :]
        text = self.roles.codec.decode(forced) + completion.text
        if not completion.complete or not text.strip():
            self.counts["backup_dropped"] += 1
            return None
        return CriticTarget(
            forced + completion.ids, len(forced), prompt.ids + completion.ids, text.strip()
        )

    def _critic_examples(
        self, batch: Sequence[Transition], targets: Sequence[CriticTarget | None]
    ) -> list[Example]:
        """L1 = KL(B M_theta-bar(. given s, a) || M_theta(. given s, a)) on the targets."""
        teacher = self.roles.settings(self.target_role).adapter
        examples = []
        for transition, target in zip(batch, targets, strict=True):
            if target is None:
                continue
            prompt = self.roles.prompt(
                "successor",
                transition.state_ids,
                transition.state_messages,
                action=transition.turn.action,
            )
            examples.append(
                Example(
                    "critic",
                    prompt.ids + target.ids,
                    len(prompt.ids),
                    target.forced,
                    Teacher(teacher, target.teacher) if self.loss.critic == "kl" else None,
                )
            )
        return weigh(examples, self.loss.critic_weight)

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

    def _generate(
        self, role: str, prompts: Sequence[Prompt], seed: int, adapter: str | None = None
    ) -> list[Completion]:
        return self.generator.generate(
            [
                self.roles.request(role, prompt, seed + 7919 * i, adapter=adapter)
                for i, prompt in enumerate(prompts)
            ]
        )

    def _seed(self) -> int:
        """A seed of this step and process alone, so that a resumed run draws the same texts."""
        return (self.seed * 1_000_003 + self.global_step) * 1_000_003 + 17 + rank() * 2**40

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"gate": self.gate.state_dict()}

    def restore_progress(self, state: dict[str, Any]) -> None:
        super().restore_progress(state)
        if "gate" in state:
            self.gate.load_state_dict(state["gate"])


def _next_messages(transition: Transition) -> list[Message]:
    own: Message = {"role": "assistant", "content": transition.turn.completion}
    return [*transition.state_messages, own, *transition.turn.replies]


def _reward(transition: Transition, kind: TargetKind) -> float:
    """What the backup is told that was earned."""
    if kind == "td":
        return transition.turn.reward
    return transition.return_to_go if kind == "outcome" else transition.best_return


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
