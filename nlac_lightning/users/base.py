"""The user side of a dialogue environment: one interface for scripted, local and remote users."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class UserReply:
    """What the user says next.

    Attributes:
        text: the words; empty where no reply could be had.
        stop: the user ends the dialogue.
        failed: why no reply could be had, else None.
    """

    text: str
    stop: bool = False
    failed: str | None = None


@dataclass(frozen=True)
class UserTask:
    """What a user knows and wants; fields as in tau2's user scenarios."""

    task_id: str
    reason_for_call: str
    known_info: str
    unknown_info: str
    instructions: str
    persona: str = ""
    domain: str = ""


class UserSession(Protocol):
    """One user in one dialogue. Never raises: a failure is a reply with ``failed`` set."""

    def open(self) -> UserReply:
        """The first message of the dialogue."""
        ...

    def reply(self, agent_message: str) -> UserReply:
        """The answer to a message of the agent."""
        ...

    def close(self) -> None:
        """Let go of what the session holds."""
        ...


class User(Protocol):
    """Whoever talks to the agent."""

    def start(self, task: UserTask, seed: int) -> UserSession:
        """Begin a dialogue."""
        ...
