"""The five roles that one language model plays, and how their answers are read.

State first, role last: a prompt is the state's ids, unchanged, then the role's instruction, so that
all roles of a state share its tokens. A role with ``context: none`` sees only its own fields; it
then shares its instruction with all other requests of that role instead.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError, require_choice
from nlac_lightning.generation.base import ADAPTERS, Completion, Request, Sampling
from nlac_lightning.roles.codec import Ids, make_codec
from nlac_lightning.roles.templates import load_templates

ROLES = ("policy", "successor", "backup", "evaluator", "refinement")
LIKE = {"aggregation": "backup", "hindsight": "refinement"}
"""Roles of baselines, and whose settings they take where they have none of their own."""


@dataclass
class RoleConfig:
    """How one role is asked."""

    adapter: str = "online"
    """``online``, ``target`` or ``base`` (the frozen model: such a role cannot be forgotten)."""
    context: Literal["state", "none"] = "state"
    """What comes before the instruction: the whole state, or nothing."""
    sampling: Sampling = field(default_factory=Sampling)
    """Greedy by default."""

    def __post_init__(self) -> None:
        require_choice("model.roles.*.adapter", self.adapter, ADAPTERS)
        require_choice("model.roles.*.context", self.context, ("state", "none"))


def _role(adapter: str, temperature: float, max_new_tokens: int) -> Callable[[], RoleConfig]:
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
    return lambda: RoleConfig(adapter=adapter, sampling=sampling)


@dataclass
class RolesConfig:
    """Prompts of all roles."""

    templates: str = "default"
    """A family that comes with the package, or a folder of your own."""
    format: Literal["auto", "chat", "plain"] = "auto"
    """``chat`` uses the tokenizer's template, ``plain`` is lines of text (better below 1B)."""
    action: Literal["react", "plain"] = "react"
    """``react``: a thought, then ``Action:`` and the action; ``plain``: all is the action."""
    policy: RoleConfig = field(default_factory=_role("online", 1.0, 256))
    successor: RoleConfig = field(default_factory=_role("online", 1.0, 192))
    backup: RoleConfig = field(default_factory=_role("target", 0.7, 192))
    evaluator: RoleConfig = field(default_factory=_role("online", 0.0, 192))
    refinement: RoleConfig = field(default_factory=_role("online", 0.7, 256))
    aggregation: RoleConfig | None = None
    """Sums up rollouts as the successor would describe them (NLRL alone); null: as ``backup``."""
    hindsight: RoleConfig | None = None
    """Refines after reading rollouts (Self-Distillation alone); null: as ``refinement``."""
    endings: tuple[str, str] | None = None
    """The words with which a description says that all ends well or badly, as ``[solved,
    failed]``. The last of them in a description is its ending, and the probability with which the
    successor model wrote it is the critique's score. Null: the evaluator's verdict is."""

    def __post_init__(self) -> None:
        if self.endings is None:
            return
        good, bad = (word.strip().lower() for word in self.endings)
        if not good or not bad or good in bad or bad in good:
            raise ConfigError(
                "model.roles.endings",
                f"{list(self.endings)} cannot be told apart",
                "use two words of which none holds the other",
            )


@dataclass(frozen=True)
class Prompt:
    """A role's prompt.

    Attributes:
        ids: all of it, the forced start of the answer included.
        prefill: how many of its last ids are that forced start.
    """

    ids: Ids
    prefill: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a critique says in short.

    Attributes:
        good: True or False, None where the critique does not say.
        score: probability of "good" in [0, 1], from that of the word by which the critic judged,
            nan without one.
    """

    good: bool | None
    score: float


class Roles:
    """Renders prompts and reads answers for one tokenizer."""

    def __init__(self, config: RolesConfig, tokenizer: Any) -> None:
        self.config = config
        self.codec = make_codec(config.format, tokenizer)
        self.templates = load_templates(config.templates)

    def settings(self, role: str) -> RoleConfig:
        """The role's configuration."""
        return getattr(self.config, role) or getattr(self.config, LIKE[role])

    def prompt(
        self, role: str, state_ids: Ids, messages: Sequence[Message], **fields: Any
    ) -> Prompt:
        """Prompt of a role in a state; ``fields`` as in :data:`templates.FIELDS`."""
        alone = self.settings(role).context == "none"
        heard = [m["content"] for m in messages if m["role"] not in ("system", "assistant")]
        text, prefill = self.templates[role].render(
            {
                "opening": self.codec.field(heard[0] if heard else ""),
                "observation": self.codec.field(heard[-1] if heard else ""),
                "agent": getattr(self.codec, "agent", "Agent"),
            }
            | {name: self.codec.field(value) for name, value in fields.items()}
        )
        if not text.strip() and not prefill:  # the policy: its instruction is the system message
            return Prompt(state_ids + self.codec.header())
        ids = () if alone else state_ids
        forced = len(self.codec.text(prefill)) if prefill else 0
        ids += self.codec.instruction(text, prefill, system=alone)
        return Prompt(ids, forced)

    def request(
        self, role: str, prompt: Prompt, seed: int = 0, adapter: str | None = None, **changes: Any
    ) -> Request:
        """The generation request for a prompt; ``changes`` replace sampling fields."""
        settings = self.settings(role)
        sampling = replace(
            settings.sampling, stop=settings.sampling.stop or self.codec.stop, **changes
        )
        return Request(
            ids=prompt.ids,
            sampling=sampling,
            adapter=adapter or settings.adapter,
            stop_ids=self.codec.stop_ids,
            seed=seed,
        )

    def action(self, text: str) -> str:
        """The action in a completion: what the environment receives; the thought stays here."""
        if self.config.action == "plain":
            return text.strip()
        return split_thought(text)[1]

    def completion(self, action: str, thought: str = "") -> Completion:
        """An action that was not sampled, as the policy would have written it."""
        if self.config.action == "plain" or self.codec.kind == "plain":
            return self.codec.given(action)
        lead = f"Thought: {thought.strip()}\n" if thought.strip() else ""
        return self.codec.given(f"{lead}Action: {action}")

    def verdict(self, critique: Completion) -> Verdict:
        """Read a critique; a cut-off one still counts if it says good or bad."""
        found = find_verdict(critique.text)
        if not found:
            return Verdict(None, math.nan)
        good, start, end = found
        sure = math.exp(min(self._logprob(critique, start, end), 0.0))
        return Verdict(good, sure if good else 1.0 - sure)

    def ending(self, description: Completion) -> Verdict:
        """How a description says that all ends, with the writer's probability of the good word.

        Without :attr:`RolesConfig.endings`, or where neither word stands, nothing is known.
        """
        found = self._last_ending(description.text)
        if found is None:
            return Verdict(None, math.nan)
        good = found.group(1) is not None
        sure = math.exp(min(self._logprob(description, found.start(), found.end()), 0.0))
        return Verdict(good, sure if good else 1.0 - sure)

    def end_as(self, text: str, good: bool) -> str:
        """The same description with its ending replaced by the good or the bad one."""
        found = self._last_ending(text)
        if found is None or self.config.endings is None:
            return text
        word = self.config.endings[0 if good else 1].strip()
        return text[: found.start()] + word + text[found.end() :]

    def _last_ending(self, text: str) -> re.Match[str] | None:
        """The last of the two words; its first group is there if it is the good one."""
        if self.config.endings is None:
            return None
        good, bad = (re.escape(word.strip()) for word in self.config.endings)
        every = list(re.finditer(rf"\b(?:({good})|({bad}))\b", text, re.IGNORECASE))
        return every[-1] if every else None

    def _logprob(self, completion: Completion, start: int, end: int) -> float:
        """Log-probability of the tokens that write ``text[start:end]``; 0 where unknown."""
        logprobs = completion.logprobs

        def length(n: int) -> int:
            return len(self.codec.decode(completion.ids[:n]))

        first = bisect_right(range(1, len(logprobs) + 1), start, key=length)
        last = bisect_right(range(1, len(logprobs) + 1), end - 1, key=length)
        return sum(logprobs[first : last + 1])


_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_ACTION = re.compile(r"^[ \t*#]*action[ \t*]*:[ \t*]*", re.IGNORECASE | re.MULTILINE)
_VERDICT = re.compile(r"\b(good|bad)\b", re.IGNORECASE)
_NOT = re.compile(
    # "not (a very) good", "isn't good", "no good": at most two words in between, no punctuation
    r"(?:(?:\b(?:not|never|hardly|cannot)|n['\u2019]t)(?:[ \t]+[a-z]+){0,2}|\bno)[ \t]+$",
    re.IGNORECASE,
)


def split_thought(text: str) -> tuple[str, str]:
    """Thought and action of a ReAct completion.

    What is after the last ``Action:`` is the action, and nothing of the thought reaches the
    environment: a completion that only thinks has the empty action.
    """
    # A chat template may open the thought in the agent's header: then only its end is visible.
    visible = _THINK.sub("", text).rpartition("</think>")[2]
    marks = list(_ACTION.finditer(visible))
    if marks:
        return visible[: marks[-1].start()].strip(), visible[marks[-1].end() :].strip()
    if re.match(r"[\s*#]*thought[\s*]*:", visible, re.IGNORECASE):
        return visible.strip(), ""
    return "", visible.strip()


def find_verdict(text: str) -> tuple[bool, int, int] | None:
    """The first ``good`` or ``bad`` in a critique, turned round by a negation before it.

    Returns:
        The verdict, and start and end of its word in the text; None where there is none.
    """
    found = _VERDICT.search(text)
    if not found:
        return None
    negated = _NOT.search(text, 0, found.start()) is not None
    return (found.group(1).lower() == "good") != negated, found.start(), found.end()
