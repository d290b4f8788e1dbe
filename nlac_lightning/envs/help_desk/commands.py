"""The command language: specifications, parsing, OpenAI tool schemas."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 300
"""Longer actions are not read; no right command comes near."""

DIGITS, WORD, TEXT = r"[0-9]{1,6}", r"[a-z]+", r".+"


class CommandError(ValueError):
    """An action that is no command; the message says why, without a full stop."""


@dataclass(frozen=True)
class Command:
    """A parsed command, in lower case."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, *self.args)))


@dataclass(frozen=True)
class Argument:
    """One argument: either a choice or a text whose form a regular expression gives."""

    name: str
    form: str = TEXT
    choices: tuple[str, ...] = ()
    required: bool = True

    def accepts(self, value: str) -> bool:
        """Whether ``value`` has the right form."""
        if not value:
            return not self.required
        return value in self.choices if self.choices else bool(re.fullmatch(self.form, value))

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the value."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string"}


@dataclass(frozen=True)
class CommandSpec:
    """One command of a level: its arguments in order, and what it does."""

    name: str
    args: tuple[Argument, ...]
    description: str

    @property
    def usage(self) -> str:
        """How to write it, as ``refund ORDER ITEM``."""
        names = (a.name.upper() if a.required else f"[{a.name.upper()}]" for a in self.args)
        return " ".join((self.name, *names))

    @property
    def tool(self) -> dict[str, Any]:
        """The OpenAI function schema."""
        parameters = {
            "type": "object",
            "properties": {a.name: a.schema for a in self.args},
            "required": [a.name for a in self.args if a.required],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def bind(self, values: Mapping[str, str]) -> Command:
        """The command with these values by argument name; raises :class:`CommandError`."""
        args = tuple(values.get(a.name, "") for a in self.args)
        names = {a.name for a in self.args}
        if not set(values) <= names or not all(map(Argument.accepts, self.args, args)):
            raise CommandError(f"use {self.usage}")
        return Command(self.name, args)


def parse(action: str, specs: Mapping[str, CommandSpec]) -> Command:
    """Read one command: ``find 52``, ``find(52)`` or ``find(order=52)``, in any case.

    Raises:
        CommandError: anything else, with the usage where the command's name is known.
    """
    text = action[: MAX_CHARS + 1].strip(" \t\r\n")
    if len(action) > MAX_CHARS or any(unicodedata.category(c)[0] == "C" for c in text):
        raise CommandError("unknown command")
    text = text.lstrip("\"'` ").rstrip("\"'`. ").lower()
    call = re.fullmatch(r"([a-z]+) ?\((.*)\)", text)
    name, rest = call.groups() if call else text.partition(" ")[::2]
    spec = specs.get(name)
    if spec is None:
        raise CommandError("unknown command")
    splits = len(spec.args) - 1
    pieces = rest.split("," if call else None, splits) if rest.strip() else []
    values: dict[str, str] = {}
    for i, piece in enumerate(pieces):
        keyword = re.match(r" *([a-z]+) *= *", piece) if call else None
        if keyword:
            key, value = keyword[1], piece[keyword.end() :]
        else:
            key, value = spec.args[i].name if spec.args else "", piece
        if key in values:
            raise CommandError(f"use {spec.usage}")
        values[key] = value.strip(" \"'`")
    return spec.bind(values)
