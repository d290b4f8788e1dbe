"""What one evaluation saw, step by step, and the scalars drawn from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError
from nlac_lightning.metrics import binary_fidelity, refinement_effect, wilson_interval

FORMAT = 1


@dataclass(frozen=True)
class StepRecord:
    """One action with what the critic, the refiner and the oracle said about it.

    Attributes:
        action, completion: text sent to the environment, and the text as sampled.
        critique, description: the evaluator's and the successor's text; empty without a critic.
        verdict: the critique's verdict, None if it could not be parsed or there was no critique.
        score: the critic's belief in [0, 1] that the action is good, nan where it has none.
        right: the oracle's word on the action, None where it has none.
        valid: the environment could parse the action.
        refined_action, refined_right: the refiner's action and the oracle's word on it.
        explored: the action came from exploration.
        reply: the environment's answer.
        reward: reward of this step.
        tool_error: the action called a tool, and whether that failed; None for other actions.
    """

    action: str
    completion: str = ""
    critique: str = ""
    description: str = ""
    verdict: bool | None = None
    score: float = math.nan
    right: bool | None = None
    valid: bool = True
    refined_action: str | None = None
    refined_right: bool | None = None
    explored: bool = False
    reply: str = ""
    reward: float = 0.0
    tool_error: bool | None = None

    @property
    def criticised(self) -> bool:
        """Whether a critic ran. One that wrote nothing after a description did run, and failed."""
        return bool(self.critique or self.description) or self.verdict is not None


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode.

    Attributes:
        policy: who acted: ``base``, ``trained`` or another label.
        reason: why it ended, see :class:`nlac_lightning.replay.episode.Episode`.
        tokens: number of tokens that the policy generated.
        opening: the first state.
        facts: what the environment knows of the task, see ``TextEnv.facts``.
    """

    task_id: str
    split: str
    policy: str
    success: bool
    total_reward: float
    steps: list[StepRecord]
    reason: str
    tokens: int
    opening: list[Message] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """All episodes of one policy on one split of one environment."""

    policy: str
    split: str
    episodes: list[EpisodeRecord]
    env: str

    def steps(self) -> Iterator[tuple[EpisodeRecord, StepRecord]]:
        """Every step beside its episode."""
        return ((episode, step) for episode in self.episodes for step in episode.steps)

    def summary(self) -> dict[str, float]:
        """Flat scalars, nan where there is no data.

        ``success`` (with ``_low``, ``_high``), ``valid_rate`` and ``right_rate`` (shares of steps;
        the second of those that the oracle judged), ``mean_turns``, ``tokens_per_episode``,
        ``n_episodes``; ``critic_vs_oracle/*`` and ``critic_vs_outcome/*`` as named by
        :func:`~nlac_lightning.metrics.binary_fidelity`, over the steps with a critique, the truth
        being the oracle's word or the success of the episode; ``refine_*`` as named by
        :func:`~nlac_lightning.metrics.refinement_effect`.
        """
        episodes = self.episodes
        steps = [step for _, step in self.steps()]
        refined = [
            (step.right, step.refined_right)
            for step in steps
            if step.right is not None and step.refined_right is not None
        ]
        successes = sum(episode.success for episode in episodes)
        scalars = {
            **wilson_interval(successes, len(episodes)).flat("success"),
            "valid_rate": _mean([step.valid for step in steps]),
            "right_rate": _mean([step.right for step in steps if step.right is not None]),
            "mean_turns": _mean([len(episode.steps) for episode in episodes]),
            "tokens_per_episode": _mean([episode.tokens for episode in episodes]),
            "n_episodes": float(len(episodes)),
        }
        effect = refinement_effect([old for old, _ in refined], [new for _, new in refined])
        return (
            scalars
            | _prefixed("critic_vs_oracle/", self._fidelity(lambda _, step: step.right))
            | _prefixed("critic_vs_outcome/", self._fidelity(lambda episode, _: episode.success))
            | _prefixed("refine_", effect)
        )

    def _fidelity(
        self, truth: Callable[[EpisodeRecord, StepRecord], bool | None]
    ) -> dict[str, float]:
        rows = [
            (step.score, step.verdict, label)
            for episode, step in self.steps()
            if step.criticised and (label := truth(episode, step)) is not None
        ]
        return binary_fidelity(
            [score for score, _, _ in rows],
            [verdict for _, verdict, _ in rows],
            [label for _, _, label in rows],
        )

    def to_json(self) -> str:
        """ASCII JSON that :meth:`from_json` reads back; a score of nan is written as null."""
        data = {"format": FORMAT, **asdict(self)}
        for episode in data["episodes"]:
            for step in episode["steps"]:
                step["score"] = None if math.isnan(step["score"]) else step["score"]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """Read :meth:`to_json`'s text.

        Raises:
            ConfigError: the text is not JSON, of another format, or lacks a field.
        """
        try:
            data = json.loads(text)
            if (found := data.pop("format")) != FORMAT:
                raise ValueError(f"format {found}, not {FORMAT}")
            data["episodes"] = [_episode(episode) for episode in data["episodes"]]
            return cls(**data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "evaluation result",
                f"cannot be read ({type(error).__name__}: {error})",
                "run the evaluation again with this version",
            ) from error


def _episode(data: dict[str, Any]) -> EpisodeRecord:
    steps = [
        StepRecord(**{**step, "score": math.nan if step["score"] is None else step["score"]})
        for step in data["steps"]
    ]
    return EpisodeRecord(**{**data, "steps": steps})


def _mean(values: list[bool] | list[int]) -> float:
    return fmean(values) if values else math.nan


def _prefixed(prefix: str, scalars: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in scalars.items()}
