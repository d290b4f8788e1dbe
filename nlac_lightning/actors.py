"""Who chooses the actions of running episodes: the model, or the environment's oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from nlac_lightning.envs.base import Message, Session, Task
from nlac_lightning.generation.base import Completion, Generator
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.roles.codec import Codec, Ids
from nlac_lightning.roles.roles import Prompt, Roles


@dataclass
class Live:
    """A running episode.

    Attributes:
        path, first: actions to begin with: explored ones, or the action of a
            :class:`~nlac_lightning.forks.Fork`.
        before: turns of the stored episode that it continues.
    """

    task: Task
    seed: int
    session: Session
    opening_ids: Ids
    state_ids: Ids
    messages: list[Message]
    rng: np.random.Generator
    started: float
    opening: list[Message]
    path: tuple[str, ...] = ()
    first: Completion | None = None
    before: int = 0
    turns: list[Turn] = field(default_factory=list)


class Actor(Protocol):
    """Whatever chooses actions."""

    version: int

    def act(self, states: Sequence[Live]) -> list[Completion]:
        """One completion per running episode."""
        ...


class ModelActor:
    """The language model in the policy role.

    Args:
        roles: prompts of the policy.
        generator: engine.
        adapter: ``online`` acts as trained, ``base`` as the untrained model.
        temperature: overrides the policy's; 0 is greedy.
    """

    def __init__(
        self,
        roles: Roles,
        generator: Generator,
        adapter: str = "online",
        temperature: float | None = None,
    ) -> None:
        self.roles, self.generator, self.adapter = roles, generator, adapter
        self.changes = {} if temperature is None else {"temperature": temperature}
        self.version = 0

    def act(self, states: Sequence[Live]) -> list[Completion]:
        requests = [
            replace(
                self.roles.request(
                    "policy",
                    self.roles.prompt("policy", live.state_ids, live.messages),
                    seed=int(live.rng.integers(2**62)),
                    adapter=self.adapter,
                    **self.changes,
                ),
                extend=True,
                once=True,
            )
            for live in states
        ]
        completions = self.generator.generate(requests)
        if completions:
            self.version = completions[0].version
        return completions

    def reflect(self, episodes: Sequence[Episode], instruction: str, seed: int) -> list[str]:
        """The model's answer to an instruction after each whole episode (a lesson from it)."""
        requests = [
            replace(
                self.roles.request(
                    "policy", Prompt(()), seed=seed, adapter=self.adapter, **self.changes
                ),
                ids=e.state_ids(len(e.turns)) + self.roles.codec.instruction(instruction),
            )
            for e in episodes
        ]
        return [completion.text.strip() for completion in self.generator.generate(requests)]


class OracleActor:
    """Plays the environment's own right actions."""

    version = 0

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def act(self, states: Sequence[Live]) -> list[Completion]:
        return [self.codec.given(live.session.oracle_action() or "") for live in states]
