"""Answers on disk, by the whole request."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nlac_lightning.errors import ConfigError

log = logging.getLogger(__name__)

SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, request TEXT, answer TEXT)"


class AnswerCache:
    """A SQLite file; several threads and processes may use it at the same time.

    A connection lasts for one look-up, which costs far less than any request it replaces and
    leaves nothing open across forks.

    Args:
        path: the file; made with its folder if missing.

    Raises:
        ConfigError: it cannot be made, or is another kind of file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                "endpoint.cache", f"cannot use {self.path} ({error})", "name another file"
            ) from error

    def get(self, request: Any) -> dict[str, Any] | None:
        """The stored answer to a JSON-serialisable request, else None."""
        key, _ = _key(request)
        try:
            with self._open() as connection:
                row = connection.execute(
                    "SELECT answer FROM answers WHERE key = ?", (key,)
                ).fetchone()
            return json.loads(row[0]) if row else None
        except (sqlite3.Error, ValueError) as error:
            log.warning("the cache %s cannot be read: %s", self.path, error)
            return None

    def put(self, request: Any, answer: dict[str, Any]) -> dict[str, Any]:
        """Store an answer; the first one stored for a request stays, and is returned."""
        key, text = _key(request)
        try:
            with self._open() as connection:
                connection.execute(
                    "INSERT OR IGNORE INTO answers VALUES (?, ?, ?)",
                    (key, text, json.dumps(answer)),
                )
            return self.get(request) or answer
        except sqlite3.Error as error:  # a full disk costs the cache, not the run
            log.warning("the cache %s cannot be written: %s", self.path, error)
            return answer

    def __len__(self) -> int:
        with self._open() as connection:
            return int(connection.execute("SELECT count(*) FROM answers").fetchone()[0])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=30.0)) as connection, connection:
            yield connection


def _key(request: Any) -> tuple[str, str]:
    text = json.dumps(request, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest(), text
