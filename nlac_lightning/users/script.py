"""A customer's scenario taken apart: facts, wishes, and reactions of the form "if ..., do ...".

Scenarios are free text in the second person ("You are Ann Lee. If the agent asks you to confirm,
only return the lamp."), as in tau2. Everything here works on sentences with plain patterns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nlac_lightning.users.base import UserTask

Trigger = Literal["confirm", "refuse", "asked", "said"]

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\"'])|\n\s*\n")
_CONDITION = re.compile(
    r"^(?:but |and |however,? )*(?:only )?(?:if|when|whenever|in case)\b(?P<if>.+?)"
    r"(?:, (?:then )?| then )(?P<then>.+)$",
    re.IGNORECASE | re.DOTALL,
)
_EMBEDDED = re.compile(r"^(?P<wish>.+?)[,;.] (?:but |and )?(?P<rest>(?:if|when) .+)$", re.I | re.S)
_CONFIRM = re.compile(r"\bconfirm", re.IGNORECASE)
_REFUSED = re.compile(
    r"^ (?:not|that fails)$|can ?not|can't|n't (?:be|able|allow|possible)|"
    r"not (?:possible|be |allow|able|help)|unable|"
    r"impossible|den(?:y|ies)|refuse|fails?\b|not going",
    re.IGNORECASE,
)
_AGENT = r"(?:the )?(?:service |customer service |human )?(?:agent|representative|they|he|she)"
_ASKED = re.compile(rf"\b(?:asked|{_AGENT} asks?|asks you)\b(?P<what>.*)", re.IGNORECASE | re.S)
_SAYS = re.compile(
    rf"{_AGENT} (?:says?|tells? you|insists?|mentions?|offers?|offered)\b(?P<what>.*)", re.I | re.S
)
_HIDDEN = re.compile(r"\b(?:not|n't|never) (?:\w+ ){0,2}(?:reveal|mention|tell|disclose)", re.I)
_STAGE = re.compile(
    r"^(?:you(?:'re| are) (?:an? )?(?:very |extremely |quite |really )*(?:\w+)"
    r"(?: (?:person|customer|user)\b.*|(?:,| and| but|\.|$).*)|"
    r"(?:make|mention|speak|respond|act|be|keep|try to get|under no)\b.*|"
    r"if (?:so|that is possible|relevant)\b.*|.*\b(?:do not|don't) end the conversation\b.*)$",
    re.IGNORECASE | re.DOTALL,
)
"""How the customer is and plays the part, as against what the customer wants."""

_WORD = re.compile(r"[a-z0-9#]+")
_COMMON = frozenset(
    _WORD.findall(
        "a an and any are as at be been but by can could did do does for from had has have how "
        "i if in is it its just like me my no not of on one or our please so some that the their "
        "them then there they this to want was we were what when which who will with would you "
        "your yes also agent ask asks asked say says tell tells mention provide help need know"
    )
)


@dataclass(frozen=True)
class Reaction:
    """What to say when something happens, once.

    Attributes:
        trigger: the agent asks for confirmation, refuses, asks about ``words``, or says them.
        words: content words of the condition; empty for the first two.
        text: what the customer then says.
    """

    trigger: Trigger
    words: frozenset[str]
    text: str


@dataclass(frozen=True)
class Script:
    """A scenario ready to be played.

    Attributes:
        wishes: sentences to say at the start.
        details: sentences about the matter, said when they are asked for.
        reactions: in the order of the text; each is used once.
        unknown: what the customer does not know.
        facts: text in which identifiers and names are looked up.
    """

    wishes: tuple[str, ...]
    details: tuple[str, ...]
    reactions: tuple[Reaction, ...]
    unknown: str
    facts: str


def read_script(task: UserTask) -> Script:
    """Take a scenario apart; never fails, whatever the text."""
    wishes: list[str] = []
    details: list[str] = []
    reactions: list[Reaction] = []
    for source, spoken in (
        (task.reason_for_call, wishes),
        (task.instructions, details),
        (task.unknown_info, details),
    ):
        for sentence in sentences(source):
            _sort(sentence, spoken, details, reactions)
    details += [first_person(s) for s in sentences(task.known_info)]
    facts = "\n".join((task.known_info, task.reason_for_call, task.instructions))
    return Script(tuple(wishes), tuple(details), tuple(reactions), task.unknown_info, facts)


def _sort(sentence: str, spoken: list[str], details: list[str], reactions: list[Reaction]) -> None:
    condition = _CONDITION.match(sentence)
    embedded = None if condition else _EMBEDDED.match(sentence)
    if condition:
        reaction = _reaction(condition["if"], condition["then"])
        if reaction:
            reactions.append(reaction)
        elif not _HIDDEN.search(sentence):
            spoken.append(first_person(sentence))
    elif embedded and (inner := _CONDITION.match(embedded["rest"])):
        reaction = _reaction(inner["if"], inner["then"])
        if reaction:
            reactions.append(reaction)
            _sort(embedded["wish"] + ".", spoken, details, reactions)
        else:
            spoken.append(first_person(sentence))
    elif _HIDDEN.search(sentence):
        details.append(first_person(re.sub(r",? but do not reveal.*$", "", sentence).strip("().")))
    elif not _STAGE.match(sentence):
        spoken.append(spoken_words(sentence))


def _reaction(condition: str, consequence: str) -> Reaction | None:
    """A reaction to the agent; None where the condition is about the matter itself."""
    text = spoken_words(consequence)
    asked, says = _ASKED.search(condition), _SAYS.search(condition)
    if asked and _CONFIRM.search(condition):
        return Reaction("confirm", frozenset(), text)
    if _REFUSED.search(condition) and (
        says or re.search(_AGENT, condition, re.I) or len(condition.split()) <= 4
    ):
        return Reaction("refuse", frozenset(), text)
    if asked:
        words = content_words(asked["what"]) or content_words(consequence)
        return Reaction("asked", words, text)
    if says:
        return Reaction("said", content_words(says["what"]), text)
    return None


_MOODS = (
    (re.compile(r"^(?:suddenly )?change your mind(?: and|,)? ", re.I), "I changed my mind. "),
    (
        re.compile(
            r"^you (?:are|get|become) (?:\w+ )?(?:angry|upset|mad|frustrated)\b[^,]*?(?:,| and)"
            r"(?: and)?(?: then)? (?=\w+ )",
            re.I,
        ),
        "I am upset about this. ",
    ),
    (re.compile(r"^swear\b[^,]*, then ", re.I), ""),
)
_LEADS = (
    (
        re.compile(
            r"^(?:you )?(?:then )?(?:also )?(?:would |can |should )?"
            r"(?:say|mention|reply|answer|tell (?:the agent|them|him|her)|explain|state)"
            r"(?: that)?:? ",
            re.I,
        ),
        "",
    ),
    (
        re.compile(
            r"^(?:you )?(?:then )?(?:ask|want to ask) (?:them |the agent )?(?:for|(?=to be)) ?",
            re.I,
        ),
        "I would like ",
    ),
    (
        re.compile(r"^(?:you )?(?:then )?ask (?:the agent )?(?:if|whether) ", re.I),
        "I would like to know whether ",
    ),
    (re.compile(r"^(?:you )?(?:then )?ask (?:the agent )?to ", re.I), "Please "),
    (
        re.compile(r"^(?:you )?(?:then )?ask (?:the agent )?(?=how|what|which|when)", re.I),
        "I would like to know ",
    ),
    (re.compile(r"^insist (?:on|persistently on) ", re.I), "I insist on "),
    (re.compile(r"^(?:you )?provide (?:that |the )?(?=\W*\w*\d)", re.I), "It is "),
    (re.compile(r"^respond (?:exactly )?with:? ", re.I), ""),
)


def spoken_words(text: str) -> str:
    """The consequence of a condition as the customer says it: no stage direction, first person."""
    text = text.strip().strip("\"'")
    prefix = ""
    for pattern, words in _MOODS:
        if pattern.match(text):
            prefix, text = prefix + words, pattern.sub("", text, count=1)
    for pattern, words in _LEADS:
        if pattern.match(text):
            text = words + pattern.sub("", text, count=1)
            break
    said = first_person(text)
    return prefix + said[:1].upper() + said[1:]


_PERSON = (
    (r"\byou name\b", "my name"),
    (r"\byou(?:'re| are)\b", "I am"),
    (r"\byou were\b", "I was"),
    (r"\byou've\b", "I have"),
    (r"\byou'd\b", "I'd"),
    (r"\byou'll\b", "I'll"),
    (r"\byourself\b", "myself"),
    (r"\byours\b", "mine"),
    (r"\byour\b", "my"),
    (
        r"\b(tells?|told|asks?|asked|gives?|gave|saves?|made|makes|provides?|offers?|"
        r"for|to|from|with|let|lets|help|about|of) you\b",
        r"\1 me",
    ),
    (r"\byou\b", "I"),
    (r"\bthe (?:service |customer service )?agent's\b", "your"),
    (
        r"\bthe (?:service |customer service )?agent (says|asks|tells|can|is|insists|does)\b",
        r"you \1",
    ),
    (r"\bthe (?:service |customer service )?agent\b", "you"),
)


def first_person(text: str) -> str:
    """A sentence about "you" as said by that person."""
    text = " ".join(text.split())
    for pattern, words in _PERSON:
        text = re.sub(pattern, words, text, flags=re.IGNORECASE)
    return text[:1].upper() + text[1:]


def sentences(text: str) -> list[str]:
    """Sentences with more than punctuation in them."""
    parts = (part.strip() for part in _SENTENCE.split(text))
    return [part for part in parts if re.search(r"\w", part) and part.lower() != "none"]


def content_words(text: str) -> frozenset[str]:
    """Lower-case words that carry meaning, plurals folded."""
    words = _WORD.findall(text.lower())
    return frozenset(w.rstrip("s") for w in words if w not in _COMMON and len(w) > 2)
