"""Weights and guards of the losses, and how the critic's targets are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nlac_lightning.errors import ConfigError, require_choice, require_positive


@dataclass
class LossConfig:
    """The two losses of the paper, its targets, and guards against forgetting and bad critics."""

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
    discount: float = 1.0
    """Probability that a foreseen success stands, for each turn that lies before it: errors then
    fade on their way back instead of adding up, and a shorter way is better. Above 0 and at most
    1; 0.8 to 0.95 is usual. Below 1 needs ``roles.endings``. 1 is the paper's."""
    next_actions: int = 1
    """Next actions whose futures are averaged in a target; above 1 needs ``roles.endings``. One,
    the paper's, makes the cheapest and noisiest targets."""
    policy_weight: float = 1.0
    """Weight of L2."""
    support: float = 0.0
    """An action is distilled only if the base model gives each of its tokens at least this
    probability. A critic knows little of what nobody does, and its greatest errors there would be
    learned. Below the share that the base leaves to its rarest sensible token; 0 is the paper's."""
    policy_kl: float = 0.0
    """Weight of KL(target policy || policy) on the batch's actions; protects the policy from the
    critic's updates, since both are one adapter. 0.1 to 1 is usual, 0 is the paper's."""
    role_replay: float = 0.0
    """Weight of KL(frozen base || model) on this step's evaluator and refinement answers, where
    the online adapter plays these roles; keeps them from drifting. 0 is the paper's."""

    def __post_init__(self) -> None:
        require_choice("model.loss.critic", self.critic, ("kl", "nll"))
        for name in ("critic_weight", "policy_weight", "policy_kl", "role_replay", "support"):
            require_positive(f"model.loss.{name}", getattr(self, name), zero=True)
        for name in ("critic_share", "discount", "next_actions"):
            require_positive(f"model.loss.{name}", getattr(self, name))
        for name in ("critic_share", "discount", "support"):
            require_positive(f"model.loss.{name}", 1 - getattr(self, name), zero=True)
        if self.critic_weight == 0 and self.policy_weight == 0:
            raise ConfigError("model.loss", "both weights are 0", "give critic or policy a weight")
        if self.lower_bound and self.discount < 1:
            raise ConfigError(
                "model.loss.lower_bound",
                "the way to the best return is not kept, so it cannot be discounted",
                "set model.loss.discount to 1, or lower_bound to false",
            )
