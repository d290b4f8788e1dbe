"""Self-Distillation (ablation of arXiv 2512.04601): refinement that reads raw rollouts.

No critic is trained: what follows an action is played, not predicted, and the refiner reads it as
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nlac_lightning.algorithms.loss_config import LossConfig
from nlac_lightning.algorithms.plays_futures import PlaysFutures
from nlac_lightning.critic import Critique
from nlac_lightning.futures import rollout_fields
from nlac_lightning.improvement import Improve, Improvement, whole
from nlac_lightning.replay.episode import Transition


class SelfDistillation(PlaysFutures):
    """L2 alone, on refinements by the ``hindsight`` role.

    In each state of the batch the base action is played on ``rollouts`` times; the refiner reads
    these rollouts in context, and what it writes is distilled into the policy. They are counted as
    environment episodes.

    Args:
        policy_kl: see :class:`~nlac_lightning.algorithms.loss_config.LossConfig`.
        options: see :class:`~nlac_lightning.algorithms.plays_futures.PlaysFutures`.

    Source: arXiv 2512.04601, ablations ("Self-Distillation").
    """

    def __init__(self, policy_kl: float = 0.0, **options: Any) -> None:
        super().__init__(
            improvement="refine",
            critic="none",
            k=1,
            m=1,
            n=1,
            loss=LossConfig(critic_weight=0.0, policy_kl=policy_kl),
            warmup=None,
            **options,
        )

    def improver(self) -> Improve:
        """Base action, its rollouts, and the action that the refiner prefers after reading them."""
        return self._refine_in_hindsight

    def _refine_in_hindsight(self, states: Sequence[Transition], seed: int) -> list[Improvement]:
        base = [completion for (completion,) in self.base_actions(states, seed)]
        actions = [self.roles.action(completion.text) for completion in base]
        futures = self.futures.play(states, base, seed)
        played = [i for i, episodes in enumerate(futures) if episodes]
        prompts = [
            self.roles.prompt(
                "hindsight",
                states[i].state_ids,
                states[i].state_messages,
                action=actions[i],
                **rollout_fields(futures[i]),
            )
            for i in played
        ]
        refined = dict(zip(played, self._generate("hindsight", prompts, seed + 1), strict=True))
        results = []
        for i, action in enumerate(actions):
            target = whole(refined[i]) if i in refined else None
            text = self.roles.action(refined[i].text) if i in refined else None
            results.append(Improvement(target, "refinement", action, Critique(""), text))
        return results
