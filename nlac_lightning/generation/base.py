"""What a generator is: requests in, completions out.

The adapter is part of each request, so no call depends on a mode that an earlier one left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nlac_lightning.errors import StoppedRun, require_positive

ADAPTERS = ("online", "target", "base")

TOO_LONG = "too_long"
"""Finish reason where the prompt leaves no position for an answer: ids and text are empty."""


FAILED = "failed"
"""Finish reason of a completion that could not be had: ids are empty, the text may say why."""


class EngineError(StoppedRun):
    """An engine outside this process died or does not answer; the requests have no completions.

    Rollouts record the episodes that waited for it as ``policy_failed`` and go on. Elsewhere the
    engine has been asked again in vain, and the run stops.
    """


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: 0 is greedy; 1 samples the model's own distribution.
        top_p: nucleus mass in (0, 1]; 1 keeps all tokens.
        top_k: number of tokens kept; 0 keeps all.
        max_new_tokens: upper limit; a completion that reaches it is finished by ``length``.
        stop: strings that end a completion; the text is cut before them.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive("sampling.temperature", self.temperature, zero=True)
        require_positive("sampling.top_k", self.top_k, zero=True)
        require_positive("sampling.max_new_tokens", self.max_new_tokens)
        require_positive("sampling.top_p", self.top_p)
        require_positive("sampling.top_p", 1.0 - self.top_p, zero=True)


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Args:
        ids: the prompt; prompts that start alike share the work of the common part.
        sampling: see :class:`Sampling`.
        adapter: ``online``, ``target`` or ``base``.
        stop_ids: token ids that end a completion (the end of a turn).
        seed: with a temperature, equal seeds give equal samples whatever else is in the call.
        extend: a later prompt will continue this completion, so its cache is worth keeping.
        once: an engine that dies is not asked again for it (:class:`EngineError`): an episode then
            counts as failed, and what made the engine die is not played for ever.
    """

    ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str = "online"
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    extend: bool = False
    once: bool = False


@dataclass(frozen=True)
class Completion:
    """What was generated.

    Attributes:
        ids: every sampled id, the stop token (or the token that completed a stop string)
            included, so that training also learns to stop.
        text: decoded ``ids`` without the stop token, cut before a stop string.
        logprobs: natural log-probability of each id under the distribution it was drawn from
            (temperature, top-p and top-k applied; greedy: the model's own distribution).
        finish_reason: ``stop``, ``length`` (cut off, not complete), :data:`TOO_LONG` or
            :data:`FAILED`.
        version: version of the adapter that answered.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str
    version: int = 0

    @property
    def complete(self) -> bool:
        """Whether the model ended by itself."""
        return self.finish_reason == "stop"


class Generator(Protocol):
    """An engine that completes prompts."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests; the result has their order."""
        ...


def with_room(request: Request, positions: int) -> Request | None:
    """``request`` with no more new tokens than ``positions`` leave; None where they leave none."""
    room = positions - len(request.ids)
    if room <= 0:
        return None
    if room >= request.sampling.max_new_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_new_tokens=room))
