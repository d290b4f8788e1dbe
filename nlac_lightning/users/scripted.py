"""A deterministic user that plays a scenario by rules: no model, no network, no time."""

from __future__ import annotations

import re

from nlac_lightning.errors import require_positive
from nlac_lightning.users.asked import SLOTS, Heard, hear, wished
from nlac_lightning.users.base import UserReply, UserSession, UserTask
from nlac_lightning.users.script import Reaction, content_words, first_person, read_script

_VALUES = {
    "user id": r"\b[a-z]+_[a-z]+_\d+\b",
    "email address": r"[\w.+-]+@[\w-]+\.[\w.-]*\w",
    "zip code": r"\b\d{5}\b",
    "order number": r"#W\d+",
    "reservation number": r"\b(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b",
}
_NAME = re.compile(r"\b(?:[Yy]ou(?:r)? name is|[Yy]ou are|[Yy]ou're) (?P<name>[A-Z]\w+ [A-Z]\w+)")
_NO_TRANSFER = re.compile(
    r"(?:not|n't|no circumstances)\b[^.]*\btransfer", re.IGNORECASE | re.DOTALL
)
_LETS_GO = re.compile(
    r"\b(?:move on|accept (?:it|this|that)|end the (?:call|conversation))\b", re.I
)
GOODBYE = "Thank you, that is all. Goodbye."


class ScriptedUser:
    """Says the wish, answers what is asked, reacts as the scenario says, leaves when it is done.

    It gives identifiers only when asked, says it does not know what the scenario says it does not,
    agrees to what the agent proposes, and ends the dialogue only after the agent has reported
    every kind of action that it wished for, has refused it for good, or has handed it over. It
    does not understand what it agrees to: a wrong proposal is accepted. That is what a
    language-model user is for.

    Args:
        max_messages: after so many messages it gives up and leaves, whatever the state.
        patience: how often it repeats a wish that was refused or passed over before it lets it go.
    """

    def __init__(self, max_messages: int = 30, patience: int = 2) -> None:
        require_positive("user.max_messages", max_messages)
        require_positive("user.patience", patience, zero=True)
        self.max_messages, self.patience = max_messages, patience

    def start(self, task: UserTask, seed: int) -> UserSession:
        """Begin a dialogue; the seed changes nothing."""
        return ScriptedSession(task, self.max_messages, self.patience)


class ScriptedSession:
    """One dialogue of a :class:`ScriptedUser`."""

    def __init__(self, task: UserTask, max_messages: int, patience: int) -> None:
        self.task, self.script = task, read_script(task)
        self.max_messages = max_messages
        self._patience = {"refused": patience, "reminded": patience}
        self._messages = 0
        self._reactions = list(self.script.reactions)
        self._wish = " ".join(self.script.wishes) or first_person(task.reason_for_call)
        self._open_kinds = set(wished(self._wish))
        self._wants_action = bool(self._open_kinds)
        self._settled = False
        self._told: set[str] = set()

    def open(self) -> UserReply:
        return self._say(f"Hi! {self._wish}".strip())

    def reply(self, agent_message: str) -> UserReply:
        heard = hear(agent_message)
        self._open_kinds -= heard.done
        self._settled |= bool(heard.done)
        if heard.transferred:
            return self._say("Thank you.", stop=True)
        if not agent_message.strip():
            return self._say(f"Are you still there? {self._wish}")
        words: list[str] = []
        reaction = self._take_reaction(heard, agent_message)
        if reaction:
            if _LETS_GO.search(reaction.text):
                return self._let_go()
            words.append(reaction.text)
            self._open_kinds |= wished(reaction.text)
        words += self._facts(heard)
        if not words and heard.refused and not heard.confirm:
            return self._refused()
        if not words and heard.confirm:
            words.append(self._consent(agent_message))
        if not words and heard.asks:
            words.append(self._detail(agent_message))
        if words:
            return self._say(" ".join(words))
        if heard.more or heard.done:
            return self._settle()
        return self._say("Okay.")

    def close(self) -> None:
        """Nothing to let go of."""

    def _say(self, text: str, stop: bool = False) -> UserReply:
        self._messages += 1
        if self._messages >= self.max_messages and not stop:
            return UserReply("I have to go now. Goodbye.", stop=True)
        return UserReply(text, stop)

    def _take_reaction(self, heard: Heard, message: str) -> Reaction | None:
        for reaction in self._reactions:
            if self._fits(reaction, heard, message):
                self._reactions.remove(reaction)
                return reaction
        return None

    @staticmethod
    def _fits(reaction: Reaction, heard: Heard, message: str) -> bool:
        if reaction.trigger == "confirm":
            return heard.confirm
        if reaction.trigger == "refuse":
            return heard.refused
        common = reaction.words & content_words(message[:4000])
        if reaction.trigger == "asked":
            return heard.asks and bool(common)
        return len(common) * 2 >= len(reaction.words) > 0

    def _facts(self, heard: Heard) -> list[str]:
        """An answer for each identifier that is asked for; what was given is not repeated."""
        answers, lacking = [], []
        for slot in heard.slots:
            value = None if self._unknown(slot) else self._value(slot)
            if value is not None:
                answers.append(f"My {slot} is {value}.")
            elif slot not in self._told:
                lacking.append(slot)
                self._told.add(slot)
        if not answers and not lacking and heard.slots and not heard.confirm:
            lacking = list(heard.slots[:1])
        return answers + [f"I do not know my {slot}." for slot in lacking]

    def _unknown(self, slot: str) -> bool:
        pattern = SLOTS[slot].replace("|which order", "").replace("|which reservation", "")
        said = self.task.unknown_info
        return bool(re.search(pattern, said, re.I) or slot in said.lower())

    def _value(self, slot: str) -> str | None:
        facts = self.script.facts
        if slot == "name":
            named = _NAME.search(facts)
            ident = re.search(_VALUES["user id"], facts)
            if named:
                return named["name"]
            return " ".join(ident[0].split("_")[:2]).title() if ident else None
        found = dict.fromkeys(re.findall(_VALUES[slot], facts))
        return " and ".join(found) or None

    def _consent(self, message: str) -> str:
        if re.search(r"transfer|human agent", message, re.I):
            if _NO_TRANSFER.search(f"{self.task.instructions} {self.task.reason_for_call}"):
                return "No, I do not want to be transferred. Please help me yourself."
            return "Yes, please."
        return "Yes, please go ahead."

    def _detail(self, message: str) -> str:
        """The sentence of the scenario that has most in common with the question."""
        asked = content_words(message[:4000])
        sentences = [*self.script.details, *self.script.wishes]
        best = max(sentences, key=lambda s: len(asked & content_words(s)), default="")
        if asked & content_words(best):
            return best
        if re.search(r"\bor\b|\bwhich\b|\bprefer|\blike\b", message, re.I):
            return f"I leave that to you. {self._wish}"
        return "I do not know that."

    def _refused(self) -> UserReply:
        if self._patience["refused"] > 0:
            self._patience["refused"] -= 1
            return self._say(f"Is there really no way? {self._wish}")
        return self._let_go()

    def _let_go(self) -> UserReply:
        """What was refused is no longer waited for; if nothing else is, the dialogue ends."""
        return self._say("I see. " + GOODBYE, stop=True)

    def _settle(self) -> UserReply:
        """The agent is done, or thinks so: leave, or remind it of what is missing."""
        # a question is answered once the agent offers more help, an action once it is reported
        if not self._open_kinds and (self._settled or not self._wants_action):
            return self._say(GOODBYE, stop=True)
        if self._patience["reminded"] > 0:
            self._patience["reminded"] -= 1
            missing = [w for w in self.script.wishes if wished(w) & self._open_kinds]
            return self._say("I am still waiting for this: " + " ".join(missing or [self._wish]))
        if self._settled:  # something was done, and the agent holds that it was everything
            return self._say(GOODBYE, stop=True)
        return self._say("Please do what I asked for.")
