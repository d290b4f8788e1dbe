"""Proximal policy optimisation (arXiv 1707.06347) on the agent's tokens, with a value head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlac_lightning.errors import require_positive
from nlac_lightning.policy_gradient.advantages import gae, normalise
from nlac_lightning.policy_gradient.on_policy import (
    KLConfig,
    OnPolicy,
    TokenTargets,
    per_trajectory,
)
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.surrogate import clipped_value_loss
from nlac_lightning.policy_gradient.tokens import TokenOutputs, ValueHead, read_values
from nlac_lightning.policy_gradient.trajectory import Segment, Trajectory


class PPO(OnPolicy):
    """Token-level PPO: a clipped surrogate, GAE over whole episodes, a linear value head.

    Values, and the reference of the KL penalty, are read once per rollout; an episode that a limit
    cut bootstraps from the value of its last state.

    Args:
        episodes: episodes of a rollout; more make advantages less noisy.
        minibatches, epochs: parts of a rollout and passes over it: ``minibatches * epochs``
            gradient steps a rollout. More reuse data, at staler ratios.
        gamma, lam: discount and GAE's trace decay per token. With a reward at the end of long
            episodes both are 1 or close to it.
        clip, clip_high: see :class:`OnPolicy`; 0.1 to 0.3 is usual.
        value_weight: weight of the value loss.
        value_clip: how far a value may move from the one at the rollout; None does not clip.
        entropy: weight of the entropy bonus; 0 to 0.01 is usual.
        normalise_advantages: to mean 0 and deviation 1 over the tokens of a minibatch.
        kl: see :class:`KLConfig`.
        seed: order of minibatches.
        parts: backbone, roles, optimizer, compute and evaluation; see :class:`Algorithm`.
    """

    saved_parameters = ("lora_", "value_head.")

    def __init__(
        self,
        episodes: int = 32,
        minibatches: int = 2,
        epochs: int = 2,
        gamma: float = 1.0,
        lam: float = 0.95,
        clip: float = 0.2,
        clip_high: float | None = None,
        value_weight: float = 0.1,
        value_clip: float | None = 0.2,
        entropy: float = 0.0,
        normalise_advantages: bool = True,
        kl: KLConfig | None = None,
        seed: int = 0,
        **parts: Any,
    ) -> None:
        plan = RolloutPlan(episodes, minibatches, epochs)
        super().__init__(plan, clip, clip_high, entropy, kl, seed, **parts)
        for name, value in (("gamma", gamma), ("lam", lam)):
            require_positive(f"model.{name}", value, zero=True)
            require_positive(f"model.{name}", 1 - value, zero=True)
        require_positive("model.value_weight", value_weight, zero=True)
        if value_clip is not None:
            require_positive("model.value_clip", value_clip)
        self.gamma, self.lam = gamma, lam
        self.value_weight, self.value_clip = value_weight, value_clip
        self.normalise_advantages = normalise_advantages

    def configure_model(self) -> None:
        super().configure_model()
        if self.value_head is None:
            width = self.backbone.model.get_base_model().get_input_embeddings().embedding_dim
            self.value_head = ValueHead(width).to(self.backbone.device)

    def remember(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """Reference, values before each token, and value of each last state."""
        assert self.value_head is not None
        turns = [segment for t in trajectories for segment in t.segments]
        # the value after the last token is read before one more, of any id
        ends = [Segment((*t.final_ids, 0), len(t.final_ids)) for t in trajectories]
        pack_tokens = self.compute_config.train_pack_tokens
        values = read_values(self.backbone, turns + ends, self.value_head, pack_tokens)
        return super().remember(trajectories) | {
            "values": per_trajectory(trajectories, values[: len(turns)]),
            "bootstrap": values[len(turns) :],
        }

    def advantages(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        values = self._known("values", trajectories)
        ends = self._known("bootstrap", trajectories)
        pairs = [
            gae(r, v, float(end[0]) if t.truncated else 0.0, self.gamma, self.lam)
            for t, r, v, end in zip(trajectories, rewards, values, ends, strict=True)
        ]
        advantages = [advantage for advantage, _ in pairs]
        if self.normalise_advantages:
            advantages = normalise(advantages)
        return advantages, [returns for _, returns in pairs]

    def token_weights(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        total = sum(len(t) for t in trajectories)
        return [np.full(len(t), 1 / total) for t in trajectories]

    def token_loss(self, new: TokenOutputs, at: TokenTargets) -> tuple[Tensor, dict[str, Tensor]]:
        loss, facts = super().token_loss(new, at)
        assert new.values is not None
        value = clipped_value_loss(new.values, at.values, at.returns, self.value_clip)
        facts["value"] = value.detach()
        facts["value_error"] = (new.values.detach() - at.returns).abs()
        return loss + self.value_weight * value, facts | {"returns": torch.clone(at.returns)}
