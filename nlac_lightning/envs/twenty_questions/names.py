"""Object names: when two are the same, and which one a sentence guesses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_GUESS = re.compile(
    r"(?:(?:so |then |ok |okay )?(?:(?:my |final |my final )?(?:guess|answer) is|i (?:would )?guess"
    r"|i (?:think|believe)|guess|final answer|is it|it is|it s|its|it must be|could it be"
    r"|are you thinking of|is (?:the|your) (?:object|thing|word)|the (?:object|thing|word) is)"
    r" )*(?:(?:a|an|the|some|your|called|named|pair of) )*"
)
"""What may stand before the name in a guess."""

_IRREGULAR = {"mice": "mouse", "geese": "goose", "feet": "foot", "teeth": "tooth"}


def fold(text: str) -> str:
    """Lower case, marks and hyphens as single spaces."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def singulars(name: str) -> list[str]:
    """``name`` and what it may be the plural of, likelier forms first; the last word decides."""
    head, space, word = name.rpartition(" ")
    forms = [word, *filter(None, [_IRREGULAR.get(word)])]
    for ending, replacement in (("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("ves", "fe")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            forms.append(word.removesuffix(ending) + replacement)
    return [head + space + form for form in forms]


class Names:
    """Finds objects by whole names; case, articles, plurals, hyphens and marks do not count.

    Args:
        names: each object and its names.
    """

    def __init__(self, names: Mapping[str, Iterable[str]]) -> None:
        self._objects: dict[str, str] = {}
        every = [(fold(name), key) for key, aliases in names.items() for name in aliases]
        for form, key in every:  # whole names before what they may be plurals of
            self._objects.setdefault(form, key)
        for name, key in every:
            for form in singulars(name):
                self._objects.setdefault(form, key)

    def find(self, name: str) -> str | None:
        """The object of exactly this name."""
        folded = fold(name)
        forms = [folded, *singulars(folded)]
        return next((self._objects[form] for form in forms if form in self._objects), None)

    def guess(self, text: str) -> str | None:
        """The object that ``text`` guesses: ``Is it a tennis ball?``, ``cats``, else None."""
        folded = fold(text)
        found = self.find(folded)
        opening = _GUESS.match(folded + " ")
        if found is None and opening:
            found = self.find(folded[opening.end() :])
        return found
