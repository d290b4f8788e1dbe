"""Foreign text made safe to show: what cannot be seen is written out, nothing is dropped."""

from __future__ import annotations

import logging
import unicodedata

_KEPT = "\n\t\u200c\u200d"
"""Line breaks, tabs, and the joiners that some scripts and emoji need."""

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Controls, format characters such as bidirectional overrides, surrogates, separators."""


def visible(text: str) -> str:
    """``text`` with each control, format or surrogate character replaced by a visible sign.

    The result can be encoded as UTF-8 and cannot steer a terminal or reorder a page. ASCII
    controls become their Unicode pictures, others their code point, as in ``<U+202E>``.
    """
    return "".join(_sign(char) for char in text)


def one_line(text: str, width: int) -> str:
    """:func:`visible` text on one line of at most ``width`` characters."""
    line = visible(text).replace("\n", " ").replace("\t", " ")
    return line if len(line) <= width else line[: width - 1] + "…"


class SafeFormatter(logging.Formatter):
    """Log lines in which no text from a model, a user or a tool can pass for another line."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record)).replace("\n", "\n  | ")


def _sign(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _HIDDEN:
        return char
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
