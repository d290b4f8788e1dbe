"""Copies what is good of a damaged buffer into a new one."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.connection import Database
from nlac_lightning.replay.schema import (
    INSERT_EPISODE,
    INSERT_TURN,
    TABLES,
    checksum,
    decode_episode,
    validate,
)

MISSING = 20_000
"""Row numbers without a row after which no further row is looked for."""

MOST = 20_000_000
"""Row numbers above are not believed: a minute of looking for rows."""

_PAGES = slice(28, 32)
"""Where an SQLite file's first page says how many pages there are (big-endian)."""


class Salvage(NamedTuple):
    """What was saved: episodes copied, and those that were found but not whole."""

    kept: int
    lost: int


def salvage(path: Path, out: Path) -> Salvage:
    """Copy every episode that is exactly what was written, evicted ones included, to ``out``.

    Episodes keep their numbers, so that checkpoints of the run can be continued. The damaged file
    is only read; a write-ahead log beside it is read as well.

    Raises:
        ConfigError: there is no such file, it never was a buffer, or ``out`` exists.
    """
    if not path.is_file():
        raise ConfigError(str(path), "no such file", "name the replay.sqlite of a run")
    if out.exists():
        raise ConfigError(str(out), "it exists", "name a new file")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy = Path(folder, "copy.sqlite")
        shutil.copyfile(path, copy)
        log = Path(f"{path}-wal")
        if log.is_file():
            shutil.copyfile(log, f"{copy}-wal")
        _make_readable(copy, Path(folder, "new.sqlite"))
        with closing(sqlite3.connect(copy, isolation_level=None)) as damaged:
            damaged.execute("PRAGMA writable_schema = ON")  # opens a file that lost its end
            damaged.text_factory = lambda raw: raw.decode("utf-8", "replace")
            try:
                return _copy(damaged, out)
            except sqlite3.DatabaseError as error:
                raise ConfigError(
                    str(path), f"nothing of it can be read ({error})", "restore a copy of it"
                ) from error


def _make_readable(copy: Path, blank: Path) -> None:
    """Bring the log's pages into the file, and replace a first page that is no longer one.

    All buffers of one schema start with the same page but for counters, so a new file's will do.
    """
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        found = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        if {"meta", "episodes", "turns"} <= found:
            return
    Path(f"{copy}-wal").unlink(missing_ok=True)
    with closing(sqlite3.connect(blank)) as connection:
        connection.executescript(TABLES)
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    first = bytearray(blank.read_bytes()[:size])
    first[_PAGES] = (copy.stat().st_size // size).to_bytes(4, "big")
    with copy.open("r+b") as file:
        file.write(first)


def _copy(damaged: sqlite3.Connection, out: Path) -> Salvage:
    turns: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in _rows(damaged, "turns"):
        if isinstance(row[0], int):
            turns[row[0]].append(row)
    episodes = {row[0]: row for row in _rows(damaged, "episodes") if isinstance(row[0], int)}
    meta = _meta(damaged)
    ReplayBuffer(out).close()
    database = Database(out)
    kept = 0
    with database.transaction(write=True) as connection:
        for episode_id in sorted(episodes):
            *written, evicted_by, expected = episodes[episode_id]
            try:
                rows = sorted(turns[episode_id], key=lambda row: row[1])
                if checksum(written, rows) != expected:
                    continue
                _decodes(written, rows)
            except (ValueError, TypeError):
                continue
            connection.execute(INSERT_EPISODE, written)
            connection.executemany(INSERT_TURN, rows)
            connection.execute(
                "UPDATE episodes SET evicted_by = ?, checksum = ? WHERE id = ?",
                (evicted_by, expected, episode_id),
            )
            kept += 1
        connection.execute(
            """UPDATE meta SET codec = ?, env = ?, last_id = max(?, coalesce(
            (SELECT max(id) FROM episodes), 0)), transitions =
            (SELECT total(num_turns) FROM episodes WHERE evicted_by IS NULL)""",
            meta,
        )
    database.close()
    return Salvage(kept, len(set(episodes) | set(turns)) - kept)


def _decodes(written: list[Any], rows: list[tuple[Any, ...]]) -> None:
    _, task_id, split, seed, reason, opening, opening_ids, num_turns, *_ = written
    shown = (task_id, split, seed, reason, opening, opening_ids, num_turns)
    validate(decode_episode(shown, [row[2:12] for row in rows], "", ""))


def _meta(damaged: sqlite3.Connection) -> tuple[str | None, str | None, int]:
    """Codec, environment and last id; the first episode of the next run gives what is lost."""
    with suppress(sqlite3.DatabaseError, TypeError, ValueError):
        codec, env, last_id = damaged.execute("SELECT codec, env, last_id FROM meta").fetchone()
        return codec, env, int(last_id)
    return None, None, 0


def _rows(damaged: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """All rows that can be read, one by one, so that a bad page costs its own rows alone.

    The lowest and the highest number are what pages say that may be damaged as well, so the search
    begins at 1 and goes on beyond both, until a long gap.
    """
    bounds = (_bound(damaged, table, which) for which in ("min", "max"))
    known = max((n for n in bounds if n is not None and n <= MOST), default=0)
    rowid = gap = 0
    while rowid < known or gap < MISSING:
        rowid, gap = rowid + 1, gap + 1
        with suppress(sqlite3.DatabaseError):
            row = damaged.execute(f"SELECT * FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
            if row is not None:
                gap = 0
                yield row


def _bound(damaged: sqlite3.Connection, table: str, which: str) -> int | None:
    """Lowest or highest row number; None where the pages that say so are damaged."""
    try:
        return int(damaged.execute(f"SELECT {which}(rowid) FROM {table}").fetchone()[0] or 0)
    except sqlite3.DatabaseError:
        return None
