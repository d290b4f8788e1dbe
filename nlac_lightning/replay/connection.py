"""One SQLite file, opened when first used in each process, with transactions and clear errors."""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nlac_lightning.errors import ConfigError, StoppedRun
from nlac_lightning.replay.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES

BUSY_SECONDS = 30.0
"""How long to wait for another process that is writing."""


class BufferWriteError(StoppedRun):
    """Nothing of a write reached the file (a full disk, a lost lock); all before it is safe."""

    def __init__(self, path: Path, cause: sqlite3.Error) -> None:
        self.path = path
        super().__init__(
            f"{path}: could not write ({cause}); nothing of this write was kept and every earlier "
            "episode is safe. Fix: free space on the disk, make the file writable or end the "
            "other process that writes to it, then continue from the last checkpoint"
        )


class Database:
    """The connection to a buffer's file; picklable, and safe in threads and forked processes.

    SQLite connections must not cross a fork, so all are closed before one and opened again when
    next used, on either side.

    Args:
        path: the file; created, folders included, unless ``read_only``.
        read_only: refuse writes, and fail if there is no file.

    Raises:
        ConfigError: no file to read, not a SQLite file, another program's, of a newer schema or
            damaged; on first use.
    """

    def __init__(self, path: str | Path, read_only: bool = False) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        self._start()

    def _start(self) -> None:
        self.lock = threading.RLock()
        self._open: sqlite3.Connection | None = None
        _DATABASES.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        """One consistent view, or all-or-nothing write, of the file.

        Raises:
            BufferWriteError: a write failed; the file is as before.
            ConfigError: the file is damaged.
        """
        with self.lock:
            connection = self.connection()
            try:
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                yield connection
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if write:
                    raise BufferWriteError(self.path, error) from error
                raise
            except sqlite3.DatabaseError as error:
                if type(error) is sqlite3.DatabaseError:  # its subclasses are the caller's faults
                    raise damaged(self.path, error) from error
                raise
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def connection(self) -> sqlite3.Connection:
        """This process's connection; call it with ``lock`` held."""
        if self._open is None:
            self._open = _connect(self.path, self.read_only)
        return self._open

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self.lock:
            if self._open is not None:
                self._open.close()
                self._open = None


def damaged(path: Path, cause: object) -> ConfigError:
    """The error for a file that cannot be trusted."""
    return ConfigError(
        str(path),
        f"not a replay buffer or damaged ({cause})",
        f"see `nlac replay check`, save what is good with `nlac replay salvage {path} NEW`, or "
        "name a new file",
    )


EVERY_FAULT = "SELECT integrity_check FROM pragma_integrity_check"
FIRST_FAULT = "SELECT integrity_check FROM pragma_integrity_check LIMIT 1"


def integrity(connection: sqlite3.Connection) -> list[str]:
    """What SQLite's own check finds wrong, one sentence each."""
    try:
        rows = connection.execute(EVERY_FAULT).fetchall()
    except sqlite3.DatabaseError:  # a bad page ends the check in an error, after it was named
        rows = connection.execute(FIRST_FAULT).fetchall()
    texts = (" ".join(row[0].split()) for row in rows)
    return [f"integrity check: {text}" for text in texts if text != "ok"]


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only and not path.is_file():
        raise ConfigError(str(path), "no such file", "name the replay.sqlite of a run")
    connection = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,  # transactions are begun by hand
            check_same_thread=False,  # Database.lock orders the threads
        )
        _prepare(connection, path, read_only)
        return connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError | sqlite3.OperationalError):
            fix = "name a file in a folder where you may write"
            raise ConfigError(str(path), f"cannot be opened ({error})", fix) from error
        if isinstance(error, sqlite3.DatabaseError):
            raise damaged(path, error) from error
        raise


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool) -> None:
    """Check whose file it is before anything is written to it, then set it up."""
    if not read_only:
        connection.execute("BEGIN IMMEDIATE")  # two processes may create the file at once
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not (empty and not read_only):
        raise damaged(path, "an SQLite file without a replay buffer's mark")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            str(path),
            f"written with schema {version}, newer than this version's {SCHEMA_VERSION}",
            "upgrade nlac-lightning, or name a new file",
        )
    if not empty and version < SCHEMA_VERSION:
        raise ConfigError(
            str(path),
            f"written with schema {version}, older than this version's {SCHEMA_VERSION}",
            "name a new file, or export it to Parquet with the version that wrote it",
        )
    if not read_only:
        if empty:
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")


_DATABASES: weakref.WeakSet[Database] = weakref.WeakSet()
_held: list[Database] = []


def _before_fork() -> None:
    for database in list(_DATABASES):
        database.lock.acquire()
        _held.append(database)
        database.close()


def _after_fork() -> None:
    while _held:
        _held.pop().lock.release()


if hasattr(os, "register_at_fork"):  # systems without fork need no care
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
