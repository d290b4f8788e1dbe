"""What an on-policy algorithm asks of the rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from nlac_lightning.errors import ConfigError, require_positive


@dataclass(frozen=True)
class RolloutPlan:
    """How much is collected with one version of the policy, and for how many gradient steps.

    Attributes:
        episodes: episodes of a rollout.
        minibatches: parts of equal size that a rollout is trained in, one gradient step each.
        epochs: passes over a rollout.
        group_size: episodes of the same task that are played together.
        informative: episodes count only in groups whose rewards differ; others are collected
            again (DAPO's dynamic sampling).
        max_collections: how often at most, so that a policy that always fails does not hang.

    Raises:
        ConfigError: a number is not positive, or the minibatches do not hold whole groups.
    """

    episodes: int
    minibatches: int = 1
    epochs: int = 1
    group_size: int = 1
    informative: bool = False
    max_collections: int = 1

    def __post_init__(self) -> None:
        for name in ("episodes", "minibatches", "epochs", "group_size", "max_collections"):
            require_positive(f"model.{name}", getattr(self, name))
        part = self.minibatches * self.group_size
        if self.episodes % part:
            raise ConfigError(
                "model.episodes",
                f"{self.episodes} episodes do not make {self.minibatches} minibatches of groups "
                f"of {self.group_size}",
                f"set a multiple of {part}",
            )

    @property
    def steps(self) -> int:
        """Gradient steps between two rollouts."""
        return self.minibatches * self.epochs
