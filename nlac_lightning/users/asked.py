"""What an agent's message wants from the customer: details, a confirmation, or nothing more."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REQUEST = re.compile(
    r"\?|\b(?:please|kindly)\b|\b(?:could|can|may|would) (?:you|i) |\bi(?:'ll| will)? need\b|"
    r"\blet me know\b",
    re.IGNORECASE,
)
_CONFIRM = re.compile(
    r"\bconfirm|\bproceed|\bgo ahead|\byes\b.{0,12}\bno\b|\b(?:is|are) (?:this|that|these|you) "
    r"(?:correct|right|ok|okay|sure|all right)|\b(?:shall|should) i\b|"
    r"\b(?:may|can) i (?:go|proceed|continue|process|make|book|cancel)\b|"
    r"\bwould you like (?:me )?to\b|\bdo you want (?:me )?to\b",
    re.IGNORECASE,
)
_ELSE = re.compile(
    r"(?:anything|something) else|further (?:assist|help|question)|other (?:request|question)|"
    r"more i can (?:help|do)|additional (?:help|assist|request)",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(?:cannot|can ?not|can't|unable to|not able to|not possible|impossible|"
    r"not (?:eligible|allowed|permitted)|isn't possible|won't be able|"
    r"don't have the ability|couldn't|could not)\b|"
    r"\bunfortunately\b|against (?:our |the )?policy|\b(?:must|have to) (?:deny|decline)",
    re.IGNORECASE,
)
_VERBS = {
    "cancel": r"cancell?ed|cancellation",
    "return": r"returned|return",
    "refund": r"refunded|refund|compensat\w+|certificate",
    "exchange": r"exchanged|exchange",
    "modify": r"modified|updated|changed|modification|change|update|upgraded|upgrade|added|removed",
    "book": r"booked|booking|reserved",
}
_WISHES = {
    "cancel": r"cancel",
    "return": r"return(?! (?:flight|trip))",
    "refund": r"refund me|get (?:a )?refund|compensat",
    "exchange": r"exchange",
    "modify": r"modify|change|update|upgrade|downgrade|switch|remove",
    "book": r"book",
}
_DONE = re.compile(
    r"\b(?:has|have|is|are|was|were|been) (?:now |all |already |been |successfully )*"
    r"(?P<verb>processed|completed?|confirmed|initiated|placed|submitted|set|done|sent|issued|applied|"
    r"added|removed|cancell?ed|modified|updated|changed|exchanged|returned|refunded|booked|reserved|"
    r"upgraded|downgraded)\b|\bsuccessful(?:ly)?\b|\ball set\b|"
    r"\bi(?:'ve| have) (?:now |just |successfully )*(?:processed|completed|cancell?ed|modified|"
    r"updated|changed|exchanged|returned|refunded|booked|upgraded|added|issued)\b",
    re.IGNORECASE,
)
_NOT_DONE = re.compile(
    r"\b(?:will|would|once|after|before|if|when|could|not|n't|cannot|to be|should|want|like)\b|"
    r"n't\b",
    re.IGNORECASE,
)
_GENERIC = re.compile(r"\brequests?\b|\beverything\b|\ball set\b|\ball done\b", re.IGNORECASE)
TRANSFER = re.compile(
    r"(?:being|have been|has been) transferred|transferring you|"
    r"transfer(?:red)? you to a human agent\.|please hold on",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")

SLOTS: dict[str, str] = {
    "user id": r"user[ -]?id|user ?name|account (?:id|number)|\buser identification",
    "email address": r"e-?mail",
    "zip code": r"\bzip|post(?:al)? ?code",
    "name": r"(?:your|full|first|last|the) (?:and last )?names?\b|name and",
    "order number": r"order (?:id|number|#)|order's (?:id|number)|which order|"
    r"number of (?:the|your) order",
    "reservation number": r"reservation (?:id|number|code)|confirmation (?:number|code)|"
    r"booking (?:id|reference|number)|which reservation|reservation you",
}
"""What agents ask customers for, and how it is called."""


@dataclass(frozen=True)
class Heard:
    """An agent's message in short.

    Attributes:
        slots: names from :data:`SLOTS` that are asked for.
        asks: it wants some answer.
        confirm: it asks whether to go ahead.
        done: kinds of action reported as carried out; ``any`` without a kind.
        refused: it declines something.
        more: it offers further help.
        transferred: the customer is handed over.
    """

    slots: tuple[str, ...]
    asks: bool
    confirm: bool
    done: frozenset[str]
    refused: bool
    more: bool
    transferred: bool


def hear(message: str) -> Heard:
    """Read a message. Only its first 4,000 characters count, so that no text takes long."""
    parts = [s for s in _SENTENCE.split(message[:4000]) if s.strip()]
    requests = [s for s in parts if _REQUEST.search(s) and not _ELSE.search(s)]
    asked = " ".join(requests)
    slots = tuple(name for name, pattern in SLOTS.items() if re.search(pattern, asked, re.I))
    confirm = any(_CONFIRM.search(s) for s in requests)
    done: set[str] = set()
    for sentence in parts:
        found = _DONE.search(sentence)
        if found and "?" not in sentence and not _NOT_DONE.search(sentence[: found.end()]):
            kinds = {
                k for k, words in _VERBS.items() if re.search(rf"\b(?:{words})\b", sentence, re.I)
            }
            done |= kinds or {"any"}
            if _GENERIC.search(sentence) and not kinds:
                done |= set(_VERBS)
    return Heard(
        slots=slots,
        asks=bool(requests),
        confirm=confirm and not (slots and re.search(r"confirm your", asked, re.I)),
        done=frozenset(done),
        refused=any(_REFUSAL.search(s) for s in parts),
        more=any(_ELSE.search(s) for s in parts),
        transferred=any(TRANSFER.search(s) for s in parts if "?" not in s),
    )


def wished(text: str) -> frozenset[str]:
    """Kinds of action that a wish names."""
    return frozenset(k for k, words in _WISHES.items() if re.search(rf"\b(?:{words})", text, re.I))
