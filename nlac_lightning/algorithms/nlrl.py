"""Natural Language Reinforcement Learning (arXiv 2411.14251): language Monte Carlo.

NLAC's critic and losses with the other kind of target: instead of a one-step backup of a predicted
future, a summary of real ones, played by the current policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nlac_lightning.algorithms.language_critic import CriticTarget
from nlac_lightning.algorithms.nlac import stored_action
from nlac_lightning.algorithms.plays_futures import PlaysFutures
from nlac_lightning.algorithms.warmup import TargetKind
from nlac_lightning.futures import rollout_fields
from nlac_lightning.replay.episode import Transition


class NLRL(PlaysFutures):
    """NLRL on NLAC's parts.

    The critic learns, for each (s, a) of the batch, the text in which the ``aggregation`` role sums
    up ``rollouts`` on-policy rollouts from there; it takes the successor's place, so that the
    evaluator and all measures of the critic stay the same. The policy learns, of ``n`` actions that
    it enumerates itself, the one with the best critique.

    The rollouts of a step are counted as environment episodes. They cost ``rollouts`` episodes per
    transition of the batch; ``loss.critic_share`` lowers that.

    Args:
        n: actions that are enumerated.
        options: see :class:`~nlac_lightning.algorithms.plays_futures.PlaysFutures`. With
            ``warmup.targets`` ``outcome``, the targets of the warm-up describe the stored episode
            instead.

    Source: arXiv 2512.04601, baselines ("NLRL").
    """

    target_role = "aggregation"

    def __init__(self, n: int = 4, **options: Any) -> None:
        super().__init__(improvement="best_of_n", base_action="fresh", m=1, n=n, **options)

    def critic_targets(
        self, batch: Sequence[Transition], seed: int, kind: TargetKind = "td"
    ) -> list[list[CriticTarget]]:
        """Language Monte Carlo of each transition; no target where it was cut off or could not be
        played. Any other ``kind`` than ``td`` describes a stored course."""
        if kind != "td":
            return super().critic_targets(batch, seed, kind)
        futures = self.futures.play(batch, [stored_action(x) for x in batch], seed)
        played = [i for i, episodes in enumerate(futures) if episodes]
        prompts = [
            self.roles.prompt(
                "aggregation",
                batch[i].state_ids,
                batch[i].state_messages,
                action=batch[i].turn.action,
                **rollout_fields(futures[i]),
            )
            for i in played
        ]
        drawn = self._generate("aggregation", prompts, seed + 2)
        targets: list[list[CriticTarget]] = [[] for _ in batch]
        for i, prompt, completion in zip(played, prompts, drawn, strict=True):
            target = self.critic_target(prompt, completion)
            targets[i] = [target] if target is not None else []
        return targets
