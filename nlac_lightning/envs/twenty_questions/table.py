"""Objects and what is true of them, and questions answered from that table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from nlac_lightning.envs.twenty_questions.names import Names, fold
from nlac_lightning.errors import ConfigError

NO, UNCLEAR, YES = 0, 1, 2
ANSWERS = ("no", "not clear", "yes")
"""Words of the three truth values; in this order ``and`` is the minimum, ``or`` the maximum."""

BUILT_IN = Path(__file__).parent / "objects.yaml"

_MARKS = {"": YES, "-": NO, "~": UNCLEAR}


@dataclass(frozen=True)
class Attribute:
    """A property that questions ask for.

    Attributes:
        name: its name in the table.
        question: the plainest question for it.
        phrases: words that ask for it, folded.
    """

    name: str
    question: str
    phrases: tuple[str, ...]


class Table:
    """A table of objects by attributes.

    Args:
        attributes: the columns.
        names: each object with its names, its own first.
        values: [objects, attributes], each ``NO``, ``UNCLEAR`` or ``YES``.
    """

    def __init__(
        self,
        attributes: list[Attribute],
        names: dict[str, tuple[str, ...]],
        values: NDArray[np.int8],
    ) -> None:
        self.attributes, self.values = attributes, values
        self.objects = list(names)
        self.index = {name: i for i, name in enumerate(self.objects)}
        self.names = Names(names)
        self._columns = {p: j for j, a in enumerate(attributes) for p in a.phrases}
        longest_first = sorted(self._columns, key=len, reverse=True)
        self._pattern = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})(?:e?s)?\b")

    def ask(self, question: str) -> NDArray[np.int8] | None:
        """The answer for every object, or None where the question is not understood.

        Attributes that a question names are joined: by ``or`` where it says so, else all must
        hold (``a red fruit``). ``not`` turns round what comes after it. A comparison with another
        thing (``heavier than a car``) is not understood.

        Returns:
            [objects], each ``NO``, ``UNCLEAR`` or ``YES``.
        """
        text = fold(question)
        answer: NDArray[np.int8] | None = None
        rest, end = [], 0
        for found in self._pattern.finditer(text):
            between = text[end : found.start()]
            values = self.values[:, self._columns[found[1]]]
            if re.search(r"\b(not|non|without)\b", between):
                values = (YES - values).astype(np.int8)
            if answer is None:
                answer = values
            elif re.search(r"\bor\b", between):
                answer = np.maximum(answer, values)
            else:
                answer = np.minimum(answer, values)
            rest.append(between)
            end = found.end()
        compares = re.search(r"\bthan\b", "".join(rest) + text[end:])
        return None if compares else answer


def load_table(path: str | Path = BUILT_IN) -> Table:
    """Read a table in the form of ``objects.yaml``, which describes it.

    Raises:
        ConfigError: no such file, no such form, an attribute that does not exist, a word that
            stands for two attributes, or a name for two objects.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        attributes = [_attribute(name, text) for name, text in data["attributes"].items()]
        rows = list(_rows(data["kinds"]))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("env.objects", f"cannot read {path}: {error}", "name a file") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(
            "env.objects",
            f"{path} has not the form of an object table ({type(error).__name__}: {error})",
            f"write it like {BUILT_IN}",
        ) from error
    _require_unique(path, [p for a in attributes for p in a.phrases], "stands for two attributes")
    _require_unique(path, [fold(n) for names, _ in rows for n in names], "names two objects")
    if not attributes or not rows:
        raise ConfigError("env.objects", f"{path} is empty", f"write it like {BUILT_IN}")
    columns = {attribute.name: j for j, attribute in enumerate(attributes)}
    values = np.full((len(rows), len(columns)), NO, np.int8)
    for i, (names, words) in enumerate(rows):
        for word in words:
            mark = word[0] if word[0] in _MARKS else ""
            column = columns.get(word.removeprefix(mark))
            if column is None:
                raise ConfigError(
                    "env.objects",
                    f"{path} gives '{names[0]}' the unknown attribute '{word}'",
                    "add it to the attributes, or correct it",
                )
            values[i, column] = _MARKS[mark]
    return Table(attributes, {names[0]: names for names, _ in rows}, values)


def _attribute(name: str, text: str) -> Attribute:
    words = [word.strip() for word in text.split(",")]
    phrases = dict.fromkeys(fold(word) for word in (name.replace("_", " "), *words))
    return Attribute(name, words[0], tuple(phrases))


def _rows(kinds: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Names and words of each object."""
    for kind in kinds:
        for written, words in kind["objects"].items():
            names = tuple(name.strip() for name in str(written).split("/"))
            yield names, f"{kind.get('all') or ''} {words or ''}".split()


def _require_unique(path: str | Path, words: list[str], problem: str) -> None:
    double = next((word for word in words if words.count(word) > 1), None)
    if double is not None:
        raise ConfigError("env.objects", f"'{double}' {problem} in {path}", "keep one of them")
