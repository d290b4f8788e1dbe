"""The part of policy-gradient algorithms that PPO and GRPO have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.sampler import OnPolicySampler
from nlac_lightning.policy_gradient.surrogate import (
    KLEstimator,
    clipped_surrogate,
    kl_estimate,
    ratio_diagnostics,
)
from nlac_lightning.policy_gradient.tokens import (
    TokenOutputs,
    ValueHead,
    packed_states,
    read_tokens,
    token_outputs,
)
from nlac_lightning.policy_gradient.trajectory import Trajectory, make_trajectories
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import FAILURES, Transition
from nlac_lightning.replay.sampler import BatchSampler


@dataclass
class KLConfig:
    """Penalty on KL(policy || frozen base)."""

    coef: float = 0.0
    """Weight; 0.001 to 0.1 is usual, 0 computes no reference."""
    where: Literal["loss", "reward"] = "loss"
    """``loss`` adds the estimate to the loss; ``reward`` takes it off the tokens' rewards."""
    estimator: KLEstimator = "k3"
    """See :func:`~nlac_lightning.policy_gradient.surrogate.kl_estimate`; ``k1`` is for rewards."""
    corrected: bool = False
    """In the loss, multiply the estimate by the ratio to the sampling policy, through which the
    gradient flows too: it is then the divergence's own with every estimator, also off-policy
    (arXiv 2512.02556, section 3.1; TRL's default). GRPO's paper does not."""

    def __post_init__(self) -> None:
        require_positive("model.kl.coef", self.coef, zero=True)
        require_choice("model.kl.where", self.where, ("loss", "reward"))
        require_choice("model.kl.estimator", self.estimator, ("k1", "k2", "k3"))
        if self.where == "loss" and self.estimator == "k1" and not self.corrected:
            raise ConfigError(
                "model.kl.estimator",
                "the gradient of k1 as a loss is zero in expectation",
                "use k2 or k3, or set model.kl.where to reward or model.kl.corrected",
            )
        if self.where == "reward" and self.corrected:
            raise ConfigError(
                "model.kl.corrected", "no gradient flows through a reward", "set it to false"
            )


@dataclass(frozen=True)
class TokenTargets:
    """What the loss of each drawn token is computed from, each [n].

    Attributes:
        logprobs: log-probability when drawn.
        advantages: see :mod:`~nlac_lightning.policy_gradient.advantages`.
        weights: of a token's loss in the sum that is minimised; 0 masks it.
        reference: log-probability under the frozen base, nan where it is not used.
        values, returns: of the value head when the token was drawn, and its target; nan without.
    """

    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor
    values: Tensor
    returns: Tensor

    def at(self, index: Tensor) -> TokenTargets:
        """The targets of some tokens."""
        return TokenTargets(*(getattr(self, field.name)[index] for field in fields(self)))


class OnPolicy(Algorithm):
    """Base of algorithms that train on rollouts of the present policy alone.

    The loss is a sum over tokens with weights that are fixed for the whole minibatch before it is
    cut into packs, so the gradient does not depend on the size of a pack.

    Args:
        plan: how much is collected, and for how many steps it is used.
        clip, clip_high: the ratio is clipped to [1 - clip, 1 + clip_high]; None takes ``clip``.
        entropy: weight of an entropy bonus.
        kl: see :class:`KLConfig`.
        seed: order of minibatches.
        parts: backbone, roles, optimizer, compute and evaluation; see :class:`Algorithm`.
    """

    off_policy = False

    def __init__(
        self,
        plan: RolloutPlan,
        clip: float,
        clip_high: float | None,
        entropy: float,
        kl: KLConfig | None,
        seed: int,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        require_positive("model.clip", clip)
        require_positive("model.clip_high", clip if clip_high is None else clip_high)
        require_positive("model.entropy", entropy, zero=True)
        self.rollout_plan = self.plan = plan
        self.clip, self.clip_high = clip, clip if clip_high is None else clip_high
        self.entropy, self.kl, self.seed = entropy, kl or KLConfig(), seed
        self.value_head: ValueHead | None = None
        self._sampler: OnPolicySampler | None = None
        self._frozen: dict[int, dict[str, Tensor]] = {}
        sampling = self.roles_config.policy.sampling
        if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k:
            raise ConfigError(
                "model.roles.policy.sampling",
                "the ratio needs the probabilities of the whole distribution that was drawn from",
                "set temperature above 0, top_p to 1 and top_k to 0",
            )

    @abstractmethod
    def token_weights(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Weight of each token's loss, an array per trajectory; 0 masks a token."""

    @abstractmethod
    def advantages(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Advantage and return of each token (the return is nan without a value head)."""

    def make_sampler(self, buffer: ReplayBuffer, batch_size: int, seed: int) -> BatchSampler:
        """Minibatches of the newest rollout; ``data.batch_size`` has no part in them."""
        self._sampler = OnPolicySampler(buffer, self.plan, self.seed)
        return self._sampler

    def training_step(self, batch: list[Transition], batch_idx: int) -> None:
        """One gradient step on a minibatch of whole episodes."""
        began = time.perf_counter()
        trajectories = self._usable(make_trajectories(batch, self.roles))
        if not trajectories:  # all episodes of the minibatch, or of the rollout, failed
            self.log_step(self.gradient_step(dict), len(batch))
            return
        self._read_rollout(trajectories)
        targets = self.targets(trajectories)
        self.seconds["targets"] += time.perf_counter() - began
        metrics = self.gradient_step(lambda: self.accumulate(trajectories, targets))
        metrics["reward"] = float(np.mean([t.total_reward for t in trajectories]))
        metrics["truncated"] = float(np.mean([t.truncated for t in trajectories]))
        metrics["trained_tokens"] = float((targets.weights > 0).sum())
        metrics["staleness"] = float(
            self.backbone.versions["online"] - 1 - min(t.policy_version for t in trajectories)
        )
        self.log_step(metrics, len(batch))

    def targets(self, trajectories: Sequence[Trajectory]) -> TokenTargets:
        """All that the loss of the trajectories' tokens needs, in one row."""
        reference = self._known("reference", trajectories)
        rewards = [t.rewards for t in trajectories]
        if self.kl.coef and self.kl.where == "reward":
            rewards = [
                r - self.kl.coef * _estimate(t.logprobs, ref, self.kl.estimator)
                for r, t, ref in zip(rewards, trajectories, reference, strict=True)
            ]
        advantages, returns = self.advantages(trajectories, rewards)
        rows = (
            [t.logprobs for t in trajectories],
            advantages,
            self.token_weights(trajectories),
            reference,
            self._known("values", trajectories),
            returns,
        )
        device = self.backbone.device
        return TokenTargets(
            *(torch.tensor(np.concatenate(row), dtype=torch.float32, device=device) for row in rows)
        )

    def token_loss(self, new: TokenOutputs, at: TokenTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token [n], and facts about it for the log."""
        clip = (self.clip, self.clip_high)
        loss = clipped_surrogate(new.logprobs, at.logprobs, at.advantages, *clip)
        facts = {"policy": loss.detach(), "entropy": new.entropy.detach()}
        facts |= ratio_diagnostics(new.logprobs, at.logprobs, at.advantages, *clip)
        if self.kl.coef:
            kl = kl_estimate(new.logprobs, at.reference, self.kl.estimator)
            facts["kl"] = kl.detach()
            if self.kl.corrected:
                kl = kl * torch.exp(new.logprobs - at.logprobs)
            if self.kl.where == "loss":
                loss = loss + self.kl.coef * kl
        if self.entropy:
            loss = loss - self.entropy * new.entropy
        return loss, facts

    def accumulate(
        self, trajectories: Sequence[Trajectory], targets: TokenTargets
    ) -> dict[str, float]:
        """Forward and backward all trained tokens, pack by pack.

        Returns:
            ``loss``, and the mean of each fact over the trained tokens.
        """
        segments, places, start = [], [], 0
        for segment in (s for t in trajectories for s in t.segments):
            place = torch.arange(start, start + len(segment), device=targets.weights.device)
            start += len(segment)
            if (targets.weights[place] > 0).any():  # wholly masked ones are not even computed
                segments.append(segment)
                places.append(place)
        total, sums, count = 0.0, defaultdict[str, float](float), 0
        temperature = self.roles_config.policy.sampling.temperature
        pack_tokens = self.compute_config.train_pack_tokens
        for pack, states in packed_states(self.backbone, segments, "online", pack_tokens):
            chosen = [segments[i] for i in pack]
            new = token_outputs(self.backbone, chosen, states, temperature, self.value_head)
            at = targets.at(torch.cat([places[i] for i in pack]))
            losses, facts = self.token_loss(new, at)
            trained = at.weights > 0
            loss = (losses * at.weights)[trained].sum()
            self.manual_backward(loss)
            total += float(loss.detach())
            count += int(trained.sum())
            for name, fact in facts.items():
                sums[name] += float(fact[trained].sum())
        return {"loss": total} | {name: value / count for name, value in sums.items()}

    def remember(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """What is read once per rollout and kept for all its epochs, one tensor an episode."""
        if not self.kl.coef:
            return {}
        return {"reference": self.read(trajectories, "base")}

    def read(self, trajectories: Sequence[Trajectory], adapter: str) -> list[Tensor]:
        """Log-probability of each trajectory's tokens under another adapter."""
        parts = read_tokens(
            self.backbone,
            [segment for t in trajectories for segment in t.segments],
            adapter,
            self.compute_config.train_pack_tokens,
            self.roles_config.policy.sampling.temperature,
        )
        return per_trajectory(trajectories, parts)

    def _read_rollout(self, trajectories: Sequence[Trajectory]) -> None:
        if all(t.episode_id in self._frozen for t in trajectories):
            return
        everything = list(trajectories)
        if self._sampler is not None:
            batch = self._sampler.buffer.transitions(self._sampler.rollout())
            everything = self._usable(make_trajectories(batch, self.roles))
        columns = self.remember(everything)
        self._frozen = {
            t.episode_id: {name: column[i] for name, column in columns.items()}
            for i, t in enumerate(everything)
        }

    def _known(self, name: str, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return [
            self._frozen[t.episode_id][name].double().numpy()
            if name in self._frozen[t.episode_id]
            else np.full(len(t), np.nan)
            for t in trajectories
        ]

    def _usable(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that the policy drew itself, at most one rollout's steps ago.

        None is left where the newest rollout failed, or all of a minibatch.
        """
        now = self.backbone.versions["online"]
        oldest = now - self.plan.steps + 1
        usable = [t for t in trajectories if oldest <= t.policy_version <= now and len(t)]
        self.counts["stale_episodes"] += len(trajectories) - len(usable)
        if trajectories and not usable and not self._newest_failed():
            raise ConfigError(
                "data.buffer",
                f"no episode of the batch was played by the policy of the last "
                f"{self.plan.steps} steps",
                "train with RolloutCallback, or use an off-policy algorithm (nlac, rft)",
            )
        return usable

    def _newest_failed(self) -> bool:
        """Whether the newest rollout has no episode to train on, so that an older one is newest."""
        if self._sampler is None:
            return False
        buffer = self._sampler.buffer
        sound = buffer.outcomes(exclude=FAILURES)
        return not sound or sound[-1].episode_id < buffer.outcomes()[-1].episode_id

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["nlac"]["frozen"] = self._frozen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._frozen = checkpoint["nlac"].get("frozen", {})


def per_trajectory(trajectories: Sequence[Trajectory], parts: Sequence[Tensor]) -> list[Tensor]:
    """Join the segments' tensors of each trajectory."""
    rest = iter(parts)
    return [torch.cat([next(rest) for _ in t.segments]) for t in trajectories]


def _estimate(logprobs: np.ndarray, reference: np.ndarray, kind: KLEstimator) -> np.ndarray:
    return kl_estimate(torch.from_numpy(logprobs), torch.from_numpy(reference), kind).numpy()
