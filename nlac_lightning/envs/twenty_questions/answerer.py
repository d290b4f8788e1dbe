"""Who answers the questions: the object table, or a language model whose answers are kept."""

from __future__ import annotations

import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.endpoint import EndpointClient, EndpointConfig
from nlac_lightning.envs.twenty_questions.table import ANSWERS, UNCLEAR, Table
from nlac_lightning.errors import require_positive
from nlac_lightning.generation.base import Generator, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.codec import Codec, make_codec
from nlac_lightning.users.text import neutralise

Answer = Literal["yes", "no", "not clear"]

PROMPT = (
    "You know a secret object and answer a player's yes/no questions about it.\n"
    "The object: {object}.\n"
    "The question: {question}\n"
    'Answer with one of "yes", "no" and "not clear" and write nothing else. Answer for a typical '
    'object of this kind; "not clear" is for what cannot be said of it with yes or no.'
)
"""Instruction to a language model that answers."""


class NoAnswer(RuntimeError):
    """No answer could be had (a server is down); the message says why."""


class Answerer(ABC):
    """Answers questions about an object."""

    @abstractmethod
    def answer(self, object_name: str, question: str) -> Answer:
        """The answer for ``object_name``; what cannot be understood is ``not clear``.

        Raises:
            NoAnswer: there is none; the game is then over, by no fault of the player.
        """


class TableAnswerer(Answerer):
    """Looks the answer up in an object table."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def answer(self, object_name: str, question: str) -> Answer:
        values = self.table.ask(question)
        value = UNCLEAR if values is None else int(values[self.table.index[object_name]])
        return cast(Answer, ANSWERS[value])


def read_answer(text: str) -> Answer:
    """The answer in a model's words: whichever of the three stands first; none is ``not clear``."""
    found = re.search(r"\b(yes|no|not clear|unclear)\b", text.casefold())
    word = found[1] if found else "unclear"
    return cast(Answer, word) if word in ANSWERS else "not clear"


class GeneratorAnswerer(Answerer):
    """A local language model answers, greedily, in this process.

    Args:
        backbone: the model; its adapters stay unused. It is loaded with the first question.
        max_new_tokens: length of its answer.
    """

    def __init__(self, backbone: BackboneConfig, max_new_tokens: int = 8) -> None:
        require_positive("answerer.max_new_tokens", max_new_tokens)
        self.backbone, self.max_new_tokens = backbone, max_new_tokens

    @cached_property
    def _engine(self) -> tuple[Generator, Codec]:
        backbone = Backbone(self.backbone)
        backbone.eval()
        return InProcessGenerator(backbone), make_codec("auto", backbone.tokenizer)

    def answer(self, object_name: str, question: str) -> Answer:
        generator, codec = self._engine
        text = PROMPT.format(object=object_name, question=question)
        request = Request(
            ids=codec.instruction(codec.field(text), system=True),
            sampling=Sampling(max_new_tokens=self.max_new_tokens, stop=codec.stop),
            adapter="base",
            stop_ids=codec.stop_ids,
        )
        return read_answer(generator.generate([request])[0].text)


class EndpointAnswerer(Answerer):
    """A language model behind an OpenAI-compatible server answers, greedily.

    Args:
        endpoint: the server. Its own cache keeps whole requests; :class:`CachedAnswerer` around
            this keeps answers by object and question, whichever server gave them.
        max_new_tokens: length of its answer.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    def __init__(self, endpoint: EndpointConfig | None = None, max_new_tokens: int = 8) -> None:
        require_positive("answerer.max_new_tokens", max_new_tokens)
        self.client = EndpointClient(endpoint or EndpointConfig())
        self.sampling = Sampling(max_new_tokens=max_new_tokens)

    def answer(self, object_name: str, question: str) -> Answer:
        text = PROMPT.format(object=object_name, question=neutralise(question))
        said = self.client.chat([{"role": "user", "content": text}], self.sampling, 0)
        if said.failed is not None:
            raise NoAnswer(said.failed)
        return read_answer(said.text)


class CachedAnswerer(Answerer):
    """Keeps another answerer's answers on disk, so that another run is free and identical.

    Several processes may share the file. A question is looked up as it was written, less case and
    space around it.

    Args:
        answerer: asked once for each object and question.
        path: SQLite file, made where it is missing.
        name: of the answerer and its settings; other names share the file and no answers.
    """

    def __init__(self, answerer: Answerer, path: str, name: str = "") -> None:
        self.answerer, self.name = answerer, name
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=60, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS answers (answerer TEXT, object TEXT, question TEXT,"
            " answer TEXT, PRIMARY KEY (answerer, object, question))"
        )
        self._lock = threading.Lock()
        self.asked = 0

    def answer(self, object_name: str, question: str) -> Answer:
        key = (self.name, object_name, " ".join(question.split()).casefold())
        with self._lock:
            kept = self._lookup(key)
            if kept is None:
                self.asked += 1
                said = self.answerer.answer(object_name, question)
                self._db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (*key, said))
                kept = self._lookup(key) or said  # another process may have been first
        return kept

    def _lookup(self, key: tuple[str, str, str]) -> Answer | None:
        row = self._db.execute(
            "SELECT answer FROM answers WHERE answerer = ? AND object = ? AND question = ?", key
        ).fetchone()
        return cast(Answer, row[0]) if row else None


@dataclass(frozen=True)
class Audit:
    """How far an answerer agrees with itself, as shares in [0, 1].

    Attributes:
        pairs: number of questions asked.
        repeated: the same answer when asked again.
        negated: the opposite answer when asked the opposite, of those answered yes or no.
        clear: answered yes or no.
    """

    pairs: int
    repeated: float
    negated: float
    clear: float


def negate(question: str) -> str | None:
    """``Is it alive?`` as ``Is it not alive?``; None where the form is another."""
    found = re.match(
        r"\s*(is|does|can|could|has|will|would|are|do) (it|they|you)\b", question, re.I
    )
    return None if not found else f"{found[0]} not{question[found.end() :]}"


def audit(answerer: Answerer, pairs: Iterable[tuple[str, str]]) -> Audit:
    """Ask each (object, question) twice, and its opposite; give it no cache to hide behind."""
    same, opposite, clear, asked = 0, [], 0, 0
    for name, question in pairs:
        first = answerer.answer(name, question)
        asked += 1
        same += answerer.answer(name, question) == first
        clear += first != "not clear"
        turned = negate(question)
        if turned and first != "not clear":
            opposite.append({first, answerer.answer(name, turned)} == {"yes", "no"})
    nan = float("nan")
    return Audit(
        pairs=asked,
        repeated=same / asked if asked else nan,
        negated=sum(opposite) / len(opposite) if opposite else nan,
        clear=clear / asked if asked else nan,
    )
