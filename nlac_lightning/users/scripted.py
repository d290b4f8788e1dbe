"""A user without a model: answers from the task's own words, the same way every time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nlac_lightning.users.base import UserReply, UserTask
from nlac_lightning.users.wording import (
    condition_met,
    conditions,
    content_words,
    facts,
    first_person,
    sentences,
    stage_direction,
    wishes,
)

_TRANSFER = re.compile(r"transfer\w* (you )?to a human|human agent|being transferred", re.I)
_CONFIRM = re.compile(
    r"\bconfirm|\(yes/no\)|\byes or no\b|\bproceed\b|\bgo ahead\b|\bshall i\b|\bis (that|this) "
    r"(right|correct|ok\w*)|\bwould you like (me )?to\b|\bdo you want (me )?to\b|\bagree\b",
    re.I,
)
_ELSE = re.compile(r"anything else|any other|further (help|assistance)|something else", re.I)
_BYE = re.compile(r"\b(good ?bye|have a (great|nice|good|wonderful)|take care)\b", re.I)
_DONE = re.compile(
    r"\b(success\w*|complet\w*|done|all set|processed|confirmed|(has|have) been|is now|"
    r"(i|we)( have|'ve)( now)? \w+ed|can ?not|unable|not (able|possible|allowed)|no longer)\b",
    re.I,
)
_ASKED = {
    "email": r"\be-?mail\b",
    "zip": r"\b(zip|postal)\b",
    "user_id": r"\b(user|customer|account) ?id\b",
    "name": r"\b(full|first|last|your) name\b",
    "order": r"\border (id|number)s?\b|\bwhich order\b",
    "reservation": r"\b(reservation|booking) (id|number|code)s?\b|\bwhich reservation\b",
}
_PATIENCE = 2


@dataclass(frozen=True)
class ScriptedUser:
    """Says what the task says, when asked; deterministic, so that runs can be repeated.

    It opens with the reason for the call, answers questions about itself from the known facts,
    says that it does not know what is listed as unknown, follows plain conditions ("if that is
    not possible, ..."), agrees to the rest, and ends the dialogue once the agent has said that
    something was done or cannot be done and offers more help. It is no language model: what it
    cannot parse it answers with what it wants. The seed changes nothing.
    """

    def start(self, task: UserTask, seed: int) -> ScriptedSession:
        return ScriptedSession(task)


@dataclass
class ScriptedSession:
    """One scripted user in one dialogue."""

    task: UserTask
    _told: set[str] = field(default_factory=set)
    _heard_result: bool = False
    _held_back: int = 0

    def __post_init__(self) -> None:
        whole = f"{self.task.reason_for_call} {self.task.instructions}"
        self._facts = facts(f"{self.task.known_info} {whole}")
        self._unknown = content_words(self.task.unknown_info)
        self._conditions = conditions(whole)
        self._wishes = wishes(self.task.instructions)

    def open(self) -> UserReply:
        """The reason for the call, with what it says in conditions kept back."""
        return UserReply(f"Hi! {self._reason() or 'I need help, please.'}")

    def reply(self, agent_message: str) -> UserReply:
        """What follows from the agent's words by the rules above."""
        if _TRANSFER.search(agent_message):
            return UserReply("All right, thank you.", stop=True)
        self._heard_result |= bool(_DONE.search(agent_message))
        reaction = self._react(agent_message)
        if reaction:
            return UserReply(reaction)
        if _ELSE.search(agent_message) or _BYE.search(agent_message):
            return self._end()
        answers = self._answers(agent_message)
        if answers:
            return UserReply(" ".join(answers))
        if _CONFIRM.search(agent_message):
            return UserReply("Yes, please go ahead.")
        return UserReply(self._next_wish() or self._about_me(agent_message))

    def close(self) -> None:
        """Nothing is held."""

    def _reason(self) -> str:
        """The reason for the call without conditions and stage directions, if anything is left."""
        whole = sentences(self.task.reason_for_call)
        kept = [sentence for sentence in whole if not stage_direction(sentence)]
        return first_person(" ".join(kept or whole))

    def _react(self, message: str) -> str:
        """The consequence of the first condition that the message meets, once for each."""
        for condition in self._conditions:
            if condition.sentence not in self._told and condition_met(condition, message):
                self._told.add(condition.sentence)
                return first_person(condition.then)
        return ""

    def _answers(self, message: str) -> list[str]:
        words = []
        for name, pattern in _ASKED.items():
            if not re.search(pattern, message, re.I):
                continue
            label = name.replace("_", " ")
            if name in self._facts:
                words.append(f"My {label} is {', '.join(self._facts[name])}.")
            elif self._unknown & {label.split()[0], label}:
                words.append(f"I do not remember my {label}.")
            elif "?" in message or re.search(r"\b(provide|need|tell)\b", message, re.I):
                words.append(f"I do not have my {label} at hand.")
        known = any(word.startswith("My ") for word in words)
        if words and not known and self.task.known_info.strip():
            words.append(first_person(self.task.known_info))
        return words

    def _next_wish(self) -> str:
        for wish in self._wishes:
            if wish not in self._told:
                self._told.add(wish)
                return first_person(wish)
        return ""

    def _about_me(self, message: str) -> str:
        if "?" not in message:
            return "Okay."
        for condition in self._conditions:  # better late than never
            if condition.sentence not in self._told:
                self._told.add(condition.sentence)
                return first_person(condition.sentence)
        return f"{first_person(self.task.known_info)} {self._reason()}".strip() or "Yes, please."

    def _end(self) -> UserReply:
        """Leave, but not before all wishes are told and a result was heard, for a while."""
        wish = self._next_wish()
        if wish:
            return UserReply(f"Yes. {wish}")
        if not self._heard_result and self._held_back < _PATIENCE:
            self._held_back += 1
            return UserReply(f"Yes, please. {self._reason()}")
        return UserReply("No, that is all. Thank you!", stop=True)
