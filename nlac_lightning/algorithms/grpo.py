"""Group-relative policy optimisation (arXiv 2402.03300) and its named variants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.policy_gradient.advantages import group_advantages
from nlac_lightning.policy_gradient.on_policy import KLConfig, OnPolicy
from nlac_lightning.policy_gradient.plan import RolloutPlan
from nlac_lightning.policy_gradient.trajectory import Trajectory


class GRPO(OnPolicy):
    """An episode's advantage is its reward relative to others of the same task; no value head.

    The variants are settings: **GRPO** ``scale: std, normalisation: sequence``; **Dr. GRPO**
    (arXiv 2503.20783) ``scale: none, normalisation: constant``; **DAPO** (arXiv 2503.14476)
    ``normalisation: token, clip_high: 0.28, dynamic_sampling: true, truncated: mask``.

    Args:
        groups: tasks of a rollout; ``groups * group_size`` episodes.
        group_size: episodes of each task; 4 to 16 is usual.
        minibatches, epochs: parts of a rollout, in whole groups, and passes over it.
        scale: ``std`` divides a group's advantages by their standard deviation.
        normalisation: ``sequence`` is the mean over an episode's tokens, then over episodes;
            ``token`` the mean over all tokens of the minibatch, so long episodes weigh more;
            ``constant`` the sum over tokens by ``max_tokens``, then the mean over episodes.
        max_tokens: agent tokens of the longest episode, for ``constant``.
        clip, clip_high: see :class:`OnPolicy`.
        dynamic_sampling: train only on groups whose rewards differ, and collect up to
            ``max_collections`` times until there are ``groups`` of them.
        max_collections: see there.
        truncated: what an episode cut by a limit does: ``keep`` trains it like any other, ``mask``
            leaves its tokens out of the loss (its reward still counts in its group).
        entropy: weight of an entropy bonus.
        kl: see :class:`KLConfig`; the penalty ``reward`` is summed over an episode.
        seed: order of minibatches.
        parts: backbone, roles, optimizer, compute and evaluation; see :class:`Algorithm`.
    """

    def __init__(
        self,
        groups: int = 4,
        group_size: int = 8,
        minibatches: int = 1,
        epochs: int = 1,
        scale: Literal["std", "none"] = "std",
        normalisation: Literal["sequence", "token", "constant"] = "sequence",
        max_tokens: int | None = None,
        clip: float = 0.2,
        clip_high: float | None = None,
        dynamic_sampling: bool = False,
        max_collections: int = 4,
        truncated: Literal["keep", "mask"] = "keep",
        entropy: float = 0.0,
        kl: KLConfig | None = None,
        seed: int = 0,
        **parts: Any,
    ) -> None:
        require_positive("model.groups", groups)
        require_positive("model.group_size", group_size - 1)
        require_choice("model.scale", scale, ("std", "none"))
        require_choice("model.normalisation", normalisation, ("sequence", "token", "constant"))
        require_choice("model.truncated", truncated, ("keep", "mask"))
        if (normalisation == "constant") != (max_tokens is not None):
            raise ConfigError(
                "model.max_tokens",
                "the normalisation 'constant', and it alone, divides by it",
                "set it to the agent tokens of the longest episode, or drop it",
            )
        if max_tokens is not None:
            require_positive("model.max_tokens", max_tokens)
        plan = RolloutPlan(
            groups * group_size,
            minibatches,
            epochs,
            group_size,
            informative=dynamic_sampling,
            max_collections=max_collections if dynamic_sampling else 1,
        )
        super().__init__(plan, clip, clip_high, entropy, kl, seed, **parts)
        self.scale, self.normalisation, self.max_tokens = scale, normalisation, max_tokens
        self.truncated = truncated

    def advantages(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The same advantage for all tokens of an episode."""
        by_task: dict[str, list[int]] = defaultdict(list)
        for i, trajectory in enumerate(trajectories):
            by_task[trajectory.task_id].append(i)
        # what came before the first sampled token has no place in `rewards`, but counts
        totals = [
            t.total_reward - t.rewards.sum() + r.sum()
            for t, r in zip(trajectories, rewards, strict=True)
        ]
        advantages = [np.zeros(len(t)) for t in trajectories]
        for group in by_task.values():
            for i, a in zip(
                group, group_advantages([totals[i] for i in group], self.scale), strict=True
            ):
                advantages[i][:] = a
        return advantages, [np.full(len(t), np.nan) for t in trajectories]

    def token_weights(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        masks = [float(self.truncated == "keep" or not t.truncated) for t in trajectories]
        trained = sum(mask * len(t) for mask, t in zip(masks, trajectories, strict=True))
        weights = []
        for mask, t in zip(masks, trajectories, strict=True):
            if self.normalisation == "token":
                weight = mask / max(trained, 1)
            else:
                length = self.max_tokens or len(t)
                weight = mask / (len(trajectories) * length)
            weights.append(np.full(len(t), weight))
        return weights
