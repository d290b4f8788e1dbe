"""What an environment is: tasks, and sessions in which text actions get text answers.

A :class:`TextEnv` holds no episode of its own: :meth:`TextEnv.reset` starts a :class:`Session`,
and any number of sessions may run side by side. Messages are OpenAI chat messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict


class Message(TypedDict):
    """One OpenAI chat message; ``name`` labels the speaker in plain-text prompts."""

    role: str
    content: str
    name: NotRequired[str]


@dataclass(frozen=True)
class Task:
    """One problem to solve: an id that is unique in the environment, its split and its data."""

    id: str
    split: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What the environment answers to one action.

    Attributes:
        messages: new messages that extend the state (tool results, user turns).
        reward: reward of this action; episodes are scored by its sum.
        terminated: the task is over by its own rules, so there is nothing to bootstrap from.
        truncated: the episode was cut by a limit; the next state still has a value.
        info: JSON-serialisable facts. ``valid`` (bool) says whether the action could be parsed,
            ``error`` names what was wrong with it, ``reason`` why an episode ended.
    """

    messages: list[Message]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OracleCritique:
    """The truth about an action: is it right, why, and which action to take (instead)."""

    good: bool
    reason: str
    action: str

    def text(self) -> str:
        """The critique as the evaluator would write it."""
        return f"good: {self.reason}" if self.good else f"bad: {self.reason} Do: {self.action}"


class Session(ABC):
    """One running episode."""

    opening: list[Message]
    """The first state: a system message, then what the agent sees before it acts."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Carry out one action. Bad actions are answered in words, never with an exception."""

    def admissible(self) -> Sequence[str]:
        """Actions worth exploring here (may be wrong ones); empty where there is no such list."""
        return ()

    def oracle_action(self) -> str | None:
        """A right action for the current state, or None where the environment knows none."""
        return None

    def oracle_critique(self, action: str) -> OracleCritique | None:
        """The truth about ``action`` in the current state, or None where it is not known."""
        return None

    def reseed(self, seed: int) -> None:  # noqa: B027 - most sessions leave nothing to chance
        """Draw from ``seed`` what chance decides from here on, so that a replayed state has more
        than one future."""

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing to release
        """Release what the session holds."""


class TextEnv(ABC):
    """A family of tasks. Subclasses are named in a config by class path."""

    name: str
    """Short name stored with every episode, so that a buffer of another task is recognised."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of ``train``, ``val`` or ``test``; the splits share no task."""

    @abstractmethod
    def reset(self, task: Task, seed: int = 0) -> Session:
        """Start an episode of ``task``. Equal seeds and actions give equal episodes."""

    def meet(self, chat_template: str | None) -> None:  # noqa: B027 - most speak one language
        """Learn, before the first episode, which chat template the model is prompted with.

        None stands for plain text. An environment may show tool calls in the model's own form.
        """

    def facts(self, task: Task) -> dict[str, Any]:
        """What is known of ``task``, for evaluations to group by; JSON-serialisable."""
        return {}
