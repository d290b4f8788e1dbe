"""Text that goes between an agent and a simulated user, made harmless in both directions."""

from __future__ import annotations

import re

END = "###STOP###"
"""What a language-model user writes to end the dialogue."""

_ENDS = re.compile(r"(?<!#)#{2,}\s*(?:STOP|TRANSFER|OUT-OF-SCOPE)\s*#{2,}", re.IGNORECASE)
_CONTROL = re.compile(
    r"<\|[^|<>\n]{0,60}\|>|</?s>|\[/?(?:INST|SYS)\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|<\uff5c[^<>\n]{0,60}\uff5c>|</?(?:tool_call|tool_response)>",
    re.IGNORECASE,
)
_AGENT_TURN = re.compile(
    r"^[ \t*#\[]*(?:agent|assistant|system|tool|customer service|representative)[ \t*\]]*:",
    re.IGNORECASE | re.MULTILINE,
)
_OWN_LABEL = re.compile(r"^[ \t*#\[]*(?:user|customer|me)[ \t*\]]*:[ \t*]*", re.IGNORECASE)
_OWN_TURN = re.compile(r"^[ \t*#\[]*(?:user|customer)[ \t*\]]*:", re.IGNORECASE | re.MULTILINE)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")

MAX_CHARS = 4000
"""Longer messages of a user are cut."""


def neutralise(text: str) -> str:
    """Text without a chat template's control tokens, invisible characters and lone surrogates.

    A token leaves a space behind, so that what stood around it cannot close up to another one.
    """
    text = _INVISIBLE.sub("", text.encode("utf-8", "replace").decode("utf-8"))
    return _CONTROL.sub(" ", text)


def user_words(text: str) -> tuple[str, bool]:
    """What a language model in the user's role says to the agent, and whether it ends there.

    Thoughts, control tokens, its own label and every turn that it wrote for somebody else are
    taken out.
    """
    text = neutralise(_THINK.sub("", text)).strip()
    text = _OWN_LABEL.sub("", text, count=1)
    for turn in (_AGENT_TURN, _OWN_TURN):
        found = turn.search(text)
        text = text[: found.start()] if found else text
    end = _ENDS.search(text)
    said = (text[: end.start()] if end else text).strip()
    return said[:MAX_CHARS], end is not None
