"""Critic warm-up: the policy waits until the critic can tell good from bad.

The gate needs no oracle. It compares the evaluator's verdict on a predicted future with its
verdict on the future that the backup gives with the real reply in hand, on each batch before that
batch is trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from nlac_lightning.critic import Critic
from nlac_lightning.distributed import gather
from nlac_lightning.errors import require_choice, require_positive
from nlac_lightning.replay.episode import Transition

TargetKind = Literal["td", "outcome", "best_outcome"]


@dataclass
class WarmupConfig:
    """When the policy starts to learn. The defaults, the paper's, start at once."""

    min_steps: int = 0
    """Gradient steps on the critic alone, at least."""
    max_steps: int = 0
    """The policy starts after so many steps whatever the gate says; equal to ``min_steps`` means
    no gate."""
    agreement: float = 0.8
    """Balanced accuracy of verdicts that opens the gate, over the last ``window`` looks."""
    every: int = 4
    """Steps between two looks; each costs one critique of the batch."""
    window: int = 2
    """Looks that are averaged."""
    targets: TargetKind = "td"
    """Targets while the policy waits: ``td`` bootstraps as always; ``outcome`` describes how the
    episode went on (Monte Carlo), which needs next to no generation, but evaluates the behaviour
    that filled the buffer instead of the current policy; ``best_outcome`` describes how the best
    of all episodes went on that did the same in the same state, so that a right action is not
    blamed for the exploration that came after it."""

    def __post_init__(self) -> None:
        require_choice("model.warmup.targets", self.targets, get_args(TargetKind))
        for name in ("min_steps", "max_steps"):
            require_positive(f"model.warmup.{name}", getattr(self, name), zero=True)
        for name in ("every", "window", "agreement"):
            require_positive(f"model.warmup.{name}", getattr(self, name))
        self.max_steps = max(self.max_steps, self.min_steps)


class Target(Protocol):
    """What the gate reads of a critic target."""

    @property
    def text(self) -> str: ...

    @property
    def weight(self) -> float: ...


class CriticGate:
    """Opens once and stays open.

    Attributes:
        is_open: the policy learns.
    """

    def __init__(self, config: WarmupConfig) -> None:
        self.config = config
        self.is_open = config.max_steps == 0
        self._looks: deque[tuple[int, int, int, int]] = deque(maxlen=config.window)

    def observe(
        self,
        critic: Critic,
        batch: Sequence[Transition],
        targets: Sequence[Sequence[Target]],
        step: int,
        seed: int,
    ) -> dict[str, float]:
        """Compare predicted with target futures where it is time to; returns what to log.

        All processes look together, so that the gate opens for all in the same step.
        """
        if self.is_open or step % self.config.every or step == 0:
            return {}
        pairs = [
            (state, max(some, key=lambda target: target.weight).text)
            for state, some in zip(batch, targets, strict=True)
            if some
        ]
        looks = [look for look in gather(_look(critic, pairs, seed)) if look is not None]
        if not looks:
            return {}
        a, b, c, d = (sum(column) for column in zip(*looks, strict=True))
        self._looks.append((a, b, c, d))
        return {"gate_agreement": self.agreement()}

    def agreement(self) -> float:
        """Balanced accuracy of the predicted verdicts; 0 while one kind was never seen."""
        right_good, good, right_bad, bad = map(sum, zip(*self._looks, strict=True))
        return (right_good / good + right_bad / bad) / 2 if good and bad else 0.0

    def open(self, step: int) -> bool:
        """Whether the policy learns in this step."""
        ready = len(self._looks) == self.config.window and step >= self.config.min_steps
        if ready and self.agreement() >= self.config.agreement:
            self.is_open = True
        if step >= self.config.max_steps:
            self.is_open = True
        return self.is_open

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"is_open": self.is_open, "looks": list(self._looks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.is_open = state["is_open"]
        self._looks = deque(map(tuple, state["looks"]), maxlen=self.config.window)


def _look(
    critic: Critic, pairs: Sequence[tuple[Transition, str]], seed: int
) -> tuple[int, int, int, int] | None:
    """Right and all verdicts on good futures, right and all on bad ones; None without any."""
    if not pairs:
        return None
    states = [state for state, _ in pairs]
    actions = [state.turn.action for state in states]
    predicted = critic.learned(states, actions, seed)
    real = critic.judge(states, actions, [[text] for _, text in pairs], seed)
    right_good = right_bad = good = bad = 0
    for guess, truth in zip(predicted, real, strict=True):
        if truth.good is None:
            continue
        good += truth.good
        bad += not truth.good
        right_good += truth.good and guess.good is True
        right_bad += not truth.good and guess.good is False
    return right_good, good, right_bad, bad
