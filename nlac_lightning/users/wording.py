"""From a task's words in the second person to what a scripted user knows and says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+\.\w+",
    "user_id": r"\b[a-z]+_[a-z]+_\d{4}\b",
    "order": r"#W\d{6,8}\b",
    "zip": r"\b\d{5}\b",
    "reservation": r"\b(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b",
    "name": r"(?:(?:You are|You're|[Yy]our name is) )([A-Z]\w+(?: [A-Z]\w+)?)",
}
_PERSON = [
    (r"\b[Yy]ou are\b", "I am"),
    (r"\b[Yy]ou're\b", "I'm"),
    (r"\b[Yy]ou've\b", "I've"),
    (r"\b[Yy]ou'd\b", "I'd"),
    (r"\b[Yy]ou were\b", "I was"),
    (r"\b[Yy]ourself\b", "myself"),
    (r"\bYour\b", "My"),
    (r"\byours\b", "mine"),
    (r"\byour\b", "my"),
    (r"\b([Yy]ou should|[Yy]ou must)\b", "I"),
    (r"\b(for|to|with|give|gives|help|helps|tell|tells|let|offer|ask|asks|transfer|charge) you\b",
     r"\1 me"),
    (r"\b[Yy]ou\b", "I"),
    (r"\b[Tt]he agent asks\b", "you ask"),
    (r"\b[Tt]he agent says\b", "you say"),
    (r"\b[Tt]he agent\b", "you"),
]  # fmt: skip
_STAGE = re.compile(
    r"\b(do not|don't|never) (mention|reveal|volunteer|tell|say|provide|share)|\byou are (a |an |"
    r"very |now |under )|\bpersonality\b|\binsist|\bpersistent\b|\bif\b|\bwhen\b|\bonly provide"
    r"\b|\bspeak\b|\byou (like|tend|talk|randomly|try|will not)\b|\bthe agent\b|\b(angry|polite)\b",
    re.I,
)
_WISH = re.compile(
    r"\b(want|wish|would like|would also like|prefer|need|would rather)\b|^(return|cancel|exchange|"
    r"change|modify|book)\b",
    re.I,
)
_IF = re.compile(r"\bif (?P<when>[^,.]+?)(?:,| then) (?P<then>[^.]+)", re.I)
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "the a an and or of to in on at for with is are be it its that this you your do does not "
        "no if agent says say said tells tell then only has have had can will would asks ask",
    )
)
_REFUSAL = re.compile(r"\b(not possible|can ?not|can't|unable|not able|not allowed|not available|"
                      r"unfortunately|sorry)\b", re.I)  # fmt: skip
_IMPOSSIBLE = re.compile(
    r"\b(not possible|impossible|cannot|can't|can not|doesn't work|unable|not allowed|refuses?|"
    r"not available|unavailable|denie[ds]|no such|fails?)\b",
    re.I,
)
_CONFIRMATION = re.compile(r"\basks? (you )?(for (a )?confirmation|to confirm)", re.I)


@dataclass(frozen=True)
class Condition:
    """``If WHEN, THEN`` in a task's words, and the sentence that holds it."""

    when: str
    then: str
    sentence: str


def sentences(text: str) -> list[str]:
    """Sentences and lines of a text, without those that are empty or only punctuation."""
    parts = re.split(r"(?<=[.!?])\s+|\n+", text.strip())
    return [part.strip() for part in parts if re.search(r"\w", part)]


def facts(text: str) -> dict[str, list[str]]:
    """What a text says about the user: ids, addresses and names as written, by kind."""
    found = {kind: list(dict.fromkeys(re.findall(p, text))) for kind, p in _PATTERNS.items()}
    return {kind: values for kind, values in found.items() if values}


def conditions(text: str) -> list[Condition]:
    """Plain conditional instructions, in their order."""
    return [
        Condition(match["when"].strip(), match["then"].strip() + ".", sentence)
        for sentence in sentences(text)
        if (match := _IF.search(sentence))
    ]


def condition_met(condition: Condition, message: str) -> bool:
    """Whether the agent's message makes a condition true, as far as words can tell."""
    if _CONFIRMATION.search(condition.when):
        return re.search(r"\bconfirm|yes/no|\bproceed\b", message, re.I) is not None
    about = content_words(condition.when)
    overlap = len(about & content_words(message))
    if _IMPOSSIBLE.search(condition.when):
        return _REFUSAL.search(message) is not None and (overlap > 0 or len(about) < 3)
    return len(about) > 1 and overlap >= 0.6 * len(about)


def wishes(text: str) -> list[str]:
    """Sentences that a user would say; stage directions and conditions are left out."""
    return [s for s in sentences(text) if _WISH.search(s) and not stage_direction(s)]


def stage_direction(sentence: str) -> bool:
    """Whether a sentence tells the user how to act, or when, rather than what to say."""
    return _STAGE.search(sentence) is not None


def content_words(text: str) -> set[str]:
    """Lower-case words of a text that carry meaning."""
    return set(re.findall(r"[a-z0-9]+", text.lower())) - _COMMON


def first_person(text: str) -> str:
    """A task's words as the user would say them."""
    for pattern, said in _PERSON:
        text = re.sub(pattern, said, text)
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]
