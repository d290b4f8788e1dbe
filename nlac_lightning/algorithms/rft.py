"""Rejection fine-tuning: imitate the actions of successful episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.examples import Example
from nlac_lightning.distributed import totals
from nlac_lightning.errors import require_choice, require_positive
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Transition
from nlac_lightning.replay.sampler import BatchSampler
from nlac_lightning.replay.successes import SuccessSampler


class RFT(Algorithm):
    """Supervised fine-tuning on successful episodes, online or offline (``episodes: 0``).

    With few successes in the buffer a batch is smaller than ``data.batch_size``; without any, the
    step changes nothing and is counted in ``skipped_steps``.

    Args:
        min_reward: an episode is successful if its total reward is above.
        per_task: newest successes of a task that are trained on, so that easy tasks do not
            dominate; None takes all.
        skip_errors: leave out actions that the environment answered with an error.
        normalisation: ``turn`` gives every action the same weight, ``token`` every token.
        seed: of the batches.
        parts: backbone, roles, optimizer, compute and evaluation; see :class:`Algorithm`.

    Source: arXiv 2308.01825 (rejection sampling fine-tuning).
    """

    off_policy = True

    def __init__(
        self,
        min_reward: float = 0.0,
        per_task: int | None = 4,
        skip_errors: bool = True,
        normalisation: Literal["turn", "token"] = "turn",
        seed: int = 0,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        require_choice("model.normalisation", normalisation, ("turn", "token"))
        if per_task is not None:
            require_positive("model.per_task", per_task)
        self.min_reward, self.per_task, self.seed = min_reward, per_task, seed
        self.skip_errors, self.normalisation = skip_errors, normalisation

    def make_sampler(self, buffer: ReplayBuffer, batch_size: int, seed: int) -> BatchSampler:
        """Transitions of successful episodes; ``data.strategy`` has no part in them."""
        return SuccessSampler(buffer, batch_size, self.min_reward, self.per_task, self.seed)

    def training_step(self, batch: list[Transition], batch_idx: int) -> None:
        """One gradient step on the batch's actions."""
        examples = self.examples(batch)
        metrics = self.optimize(examples)
        metrics["batch"] = len(examples)
        metrics["batch_tasks"] = len({x.task_id for x in batch})
        self.log_step(metrics, max(len(batch), 1))

    def examples(self, batch: Sequence[Transition]) -> list[Example]:
        """-log pi(a given s) of each action that ended by itself."""
        examples = []
        for x in batch:
            wrong = bool(x.turn.info.get("error")) or not x.turn.info.get("valid", True)
            if x.turn.finish_reason == "length" or not x.turn.action_ids:
                self.counts["cut_off_dropped"] += 1
            elif self.skip_errors and wrong:
                self.counts["errors_dropped"] += 1
            else:
                prompt = self.roles.prompt("policy", x.state_ids, x.state_messages).ids
                examples.append(Example("policy", prompt + x.turn.action_ids, len(prompt)))
        sizes = [len(e.ids) - e.start if self.normalisation == "token" else 1 for e in examples]
        (total,) = totals(sum(sizes))
        return [replace(e, weight=size / total) for e, size in zip(examples, sizes, strict=True)]
