"""The replay buffer: whole episodes in one SQLite file, transitions read from them."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.replay.connection import BufferWriteError, Database, damaged, integrity
from nlac_lightning.replay.episode import Episode, Transition
from nlac_lightning.replay.schema import (
    INSERT_EPISODE,
    INSERT_TURN,
    SELECT_ALL_TURNS,
    SELECT_ALTERNATIVES,
    SELECT_BEST_RETURN,
    SELECT_EPISODE,
    SELECT_TURNS,
    SELECT_WRITTEN,
    checksum,
    decode_episode,
    episode_row,
    turn_rows,
    validate,
)
from nlac_lightning.replay.summary import BufferStats, summarise

__all__ = ["BufferIndex", "BufferStats", "BufferWriteError", "Key", "Outcome", "ReplayBuffer"]

Key = tuple[int, int]
"""A transition's address: episode id and turn."""


class Outcome(NamedTuple):
    """How an episode went: its total reward and the newest policy version that acted in it."""

    episode_id: int
    task_id: str
    turns: int
    reward: float
    policy_version: int


class BufferIndex(NamedTuple):
    """Which transitions a buffer holds: ``turns[i]`` of them in episode ``ids[i]``, ids rising.

    ``oldest`` is the lowest id that is held (0 if none); ``truncations`` counts how often ids were
    given back, so that an index kept by a reader can be told from a stale one.
    """

    ids: np.ndarray
    turns: np.ndarray
    oldest: int
    truncations: int


class ReplayBuffer:
    """Episodes of one environment and tokenizer in one SQLite file.

    A commit survives ``kill -9``. The file is in WAL mode with ``synchronous=NORMAL``: a power cut
    may lose the last commits but never damages the file. Any number of processes may read while
    one writes; a buffer may be pickled, forked and used from several threads.

    Log-probabilities are kept as float32; ``info`` and messages as JSON.

    Args:
        path: the file, created if missing (unless ``read_only``).
        capacity: transitions to hold; beyond it the oldest episodes are evicted, whole, but never
            the newest one. Evicted episodes stay on disk for one turnover (see :meth:`truncate`).
        codec: fingerprint of tokenizer and prompt format that the ids must belong to; None
            accepts the file's, or that of the first episode.
        env: name of the environment, likewise.
        read_only: refuse writes.

    Raises:
        ConfigError: ``capacity`` is not positive; the file is missing, damaged, of a newer
            schema, of another codec or another environment.
    """

    def __init__(
        self,
        path: str | Path,
        capacity: int = 100_000,
        codec: str | None = None,
        env: str | None = None,
        read_only: bool = False,
    ) -> None:
        require_positive("data.capacity", capacity)
        self.capacity = capacity
        self._database = Database(path, read_only)
        with self._database.transaction(write=not read_only) as connection:
            self._claim(connection, codec, env)

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._database.path

    def _claim(self, connection: sqlite3.Connection, codec: str | None, env: str | None) -> None:
        """Check that the file is of this codec and environment; a new file becomes so."""
        held = connection.execute("SELECT codec, env FROM meta").fetchone()
        for name, mine, theirs in (("codec", codec, held[0]), ("env", env, held[1])):
            if mine is None or mine == theirs:
                continue
            if theirs is not None:
                owner = "tokenizer or prompt format" if name == "codec" else "task"
                raise ConfigError(
                    str(self.path),
                    f"its episodes are of another {owner} ({name} '{theirs}', not '{mine}')",
                    "name a new file for this run, or use the settings that wrote this one",
                )
            if not self._database.read_only:
                connection.execute(f"UPDATE meta SET {name} = ?", (mine,))

    def append(self, episode: Episode) -> int:
        """Store one episode in one transaction and return its id (1, 2, ...).

        Raises:
            BufferWriteError: the file could not be written; it is as before.
            ConfigError: the episode is of another codec or environment.
            ValueError, TypeError: the episode has no turn, inconsistent spans, or info that JSON
                cannot hold.
        """
        return self.append_many([episode])[0]

    def append_many(self, episodes: Iterable[Episode]) -> list[int]:
        """Store all episodes in one transaction or, on any error, none; see :meth:`append`."""
        stored: list[int] = []
        with self._database.transaction(write=True) as connection:
            episode_id = connection.execute("SELECT last_id FROM meta").fetchone()[0]
            for episode in episodes:
                validate(episode)
                episode_id += 1
                self._claim(connection, episode.codec, episode.env)
                connection.execute(INSERT_EPISODE, episode_row(episode, episode_id))
                connection.executemany(INSERT_TURN, turn_rows(episode, episode_id))
                connection.execute(
                    "UPDATE episodes SET checksum = ? WHERE id = ?",
                    (written_checksum(connection, episode_id), episode_id),
                )
                connection.execute(
                    "UPDATE meta SET last_id = ?, transitions = transitions + ?",
                    (episode_id, len(episode.turns)),
                )
                self._evict(connection, episode_id)
                stored.append(episode_id)
        return stored

    def _evict(self, connection: sqlite3.Connection, newest: int) -> None:
        transitions = connection.execute("SELECT transitions FROM meta").fetchone()[0]
        if transitions <= self.capacity:
            return
        live = connection.execute(
            "SELECT id, num_turns FROM episodes WHERE evicted_by IS NULL ORDER BY id"
        )
        for oldest, turns in live:
            if transitions <= self.capacity or oldest == newest:
                break
            transitions -= turns
        live.close()
        connection.execute(
            "UPDATE episodes SET evicted_by = ? WHERE evicted_by IS NULL AND id < ?",
            (newest, oldest),
        )
        connection.execute("UPDATE meta SET transitions = ?", (transitions,))
        connection.execute("DELETE FROM episodes WHERE evicted_by < ?", (oldest,))

    def truncate(self, high_water_mark: int) -> None:
        """Return to the state in which ``high_water_mark`` was the last id given.

        Later episodes are dropped, evictions that they caused are undone and ids count on from
        the mark, so that a resumed run stores what the run that was stopped had stored. A mark so
        old that its last episode was evicted meanwhile cannot be restored in full: a warning says
        so.

        Raises:
            ConfigError: the file never held so many episodes, so it belongs to another run.
            BufferWriteError: the file could not be written; it is as before.
        """
        with self._database.transaction(write=True) as connection:
            last_id = connection.execute("SELECT last_id FROM meta").fetchone()[0]
            if high_water_mark == last_id:
                return
            if not 0 <= high_water_mark < last_id:
                raise ConfigError(
                    str(self.path),
                    f"the checkpoint knows {high_water_mark} episodes, this file only {last_id}",
                    "set data.buffer to the file of the run that wrote the checkpoint",
                )
            if high_water_mark < _oldest(connection) - 1:
                warnings.warn(
                    f"{self.path}: the episodes of this old checkpoint were evicted since; the "
                    "resumed run will differ from the one that was stopped",
                    stacklevel=2,
                )
            connection.execute("DELETE FROM episodes WHERE id > ?", (high_water_mark,))
            connection.execute(
                "UPDATE episodes SET evicted_by = NULL WHERE evicted_by > ?", (high_water_mark,)
            )
            connection.execute(
                """UPDATE meta SET last_id = ?, truncations = truncations + 1, transitions =
                (SELECT total(num_turns) FROM episodes WHERE evicted_by IS NULL)""",
                (high_water_mark,),
            )

    def _meta(self, column: str) -> int:
        with self._database.transaction() as connection:
            return int(connection.execute(f"SELECT {column} FROM meta").fetchone()[0])

    def __len__(self) -> int:
        """Number of transitions."""
        return self._meta("transitions")

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.index().ids)

    @property
    def high_water_mark(self) -> int:
        """Highest episode id ever given; 0 before the first."""
        return self._meta("last_id")

    def seeds(self) -> list[int]:
        """Seeds of the episodes on the disk, evicted ones that are still there included."""
        with self._database.transaction() as connection:
            return [row[0] for row in connection.execute("SELECT seed FROM episodes ORDER BY id")]

    def index(self, after: int = 0, exclude: Sequence[str] = ()) -> BufferIndex:
        """Episodes with an id above ``after`` and their numbers of turns.

        Those that ended for a reason in ``exclude`` are left out.
        """
        kept = f"AND reason NOT IN ({', '.join('?' * len(exclude))}) " if exclude else ""
        with self._database.transaction() as connection:
            rows = connection.execute(
                "SELECT id, num_turns FROM episodes WHERE evicted_by IS NULL AND id > ? "
                f"{kept}ORDER BY id",
                (after, *exclude),
            ).fetchall()
            truncations = connection.execute("SELECT truncations FROM meta").fetchone()[0]
            oldest = _oldest(connection)
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
        return BufferIndex(table[:, 0], table[:, 1], oldest, truncations)

    def outcomes(self, exclude: Sequence[str] = ()) -> list[Outcome]:
        """How each episode went, oldest first; reads no text and no ids. See :meth:`index`."""
        kept = f"AND reason NOT IN ({', '.join('?' * len(exclude))}) " if exclude else ""
        with self._database.transaction() as connection:
            rows = connection.execute(
                f"""SELECT id, task_id, num_turns, total_reward,
                (SELECT max(policy_version) FROM turns WHERE episode_id = id)
                FROM episodes WHERE evicted_by IS NULL {kept}ORDER BY id""",
                tuple(exclude),
            ).fetchall()
        return [Outcome(*row) for row in rows]

    def episode_ids(self) -> list[int]:
        """Ids of all episodes, oldest first."""
        return [int(i) for i in self.index().ids]

    def episode(self, episode_id: int) -> Episode:
        """One episode; KeyError if it was never stored, dropped or evicted.

        ConfigError if the file is damaged there.
        """
        with self._database.transaction() as connection:
            return self._whole(connection, episode_id)

    def _whole(self, connection: sqlite3.Connection, episode_id: int) -> Episode:
        try:
            return self._read(connection, episode_id)
        except (ValueError, TypeError) as error:  # blobs, JSON or fields that do not decode
            raise damaged(self.path, f"episode {episode_id}: {error}") from error

    def _read(self, connection: sqlite3.Connection, episode_id: int) -> Episode:
        row = connection.execute(SELECT_EPISODE, (episode_id,)).fetchone()
        if row is None:
            raise KeyError(f"{self.path} holds no episode {episode_id}")
        turns = connection.execute(SELECT_TURNS, (episode_id,)).fetchall()
        codec, env = connection.execute("SELECT codec, env FROM meta").fetchone()
        return decode_episode(row, turns, codec, env)

    def iter_episodes(self) -> Iterator[Episode]:
        """All episodes, oldest first, one in memory at a time."""
        return (self.episode(i) for i in self.episode_ids())

    def transition(self, episode_id: int, t: int) -> Transition:
        """One transition; KeyError without the episode, IndexError without the turn."""
        return self.transitions([(episode_id, t)])[0]

    def transitions(self, keys: Iterable[Key]) -> list[Transition]:
        """Transitions in the order of ``keys``, each episode read once; see :meth:`transition`."""
        keys = list(keys)
        with self._database.transaction() as connection:
            episodes = {i: self._whole(connection, i) for i in {i for i, _ in keys}}
            best = [connection.execute(SELECT_BEST_RETURN, key).fetchone()[0] for key in keys]
        return [
            replace(episodes[i].transition(t, i), best_return=value)
            for (i, t), value in zip(keys, best, strict=True)
        ]

    def alternatives(self, key: Key) -> list[tuple[Key, float]]:
        """What was done in the state of a transition, itself included: one entry per action.

        Returns the newest transition of each action and its ``best_return``, oldest first. Only
        states that are equal to the token, of the same task, count as the same.
        """
        with self._database.transaction() as connection:
            rows = connection.execute(SELECT_ALTERNATIVES, key).fetchall()
        return [((episode_id, t), best) for episode_id, t, best in rows]

    def stats(self) -> BufferStats:
        """Summary of the episodes held; reads every row once."""
        with self._database.transaction() as connection:
            return summarise(connection, self.path)

    def problems(self) -> list[str]:
        """What is wrong with the file, one sentence each; empty if every episode can be read."""
        found: list[str] = []
        try:
            with self._database.transaction() as connection:
                found += integrity(connection)
                found += self._misfits(connection)
                ids = connection.execute("SELECT id FROM episodes ORDER BY id").fetchall()
                for (episode_id,) in ids:
                    try:
                        found += self._wrong(connection, episode_id)
                    except (ValueError, TypeError, sqlite3.DatabaseError) as error:
                        found.append(f"episode {episode_id}: {error}")
        except ConfigError as error:  # a bad page fails any query, even the transaction's end
            return [str(error), *found]
        return found

    @staticmethod
    def _misfits(connection: sqlite3.Connection) -> list[str]:
        """Turns without an episode, and a count that is not the sum."""
        found = [
            f"row {rowid} of {table} belongs to no episode"
            for table, rowid, *_ in connection.execute("PRAGMA foreign_key_check")
        ]
        counted, summed = connection.execute(
            "SELECT transitions, (SELECT total(num_turns) FROM episodes "
            "WHERE evicted_by IS NULL) FROM meta"
        ).fetchone()
        if counted != summed:
            found.append(f"{counted} transitions counted, {summed:.0f} stored")
        return found

    def _wrong(self, connection: sqlite3.Connection, episode_id: int) -> list[str]:
        """Problems of one episode; raises for what cannot be decoded."""
        expected, evicted = connection.execute(
            "SELECT checksum, evicted_by FROM episodes WHERE id = ?", (episode_id,)
        ).fetchone()
        if evicted is None:
            validate(self._read(connection, episode_id))
        if written_checksum(connection, episode_id) != expected:
            return [f"episode {episode_id}: its content is not what was written"]
        return []

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        self._database.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def written_checksum(connection: sqlite3.Connection, episode_id: int) -> int:
    """:func:`~nlac_lightning.replay.schema.checksum` of what the file holds of an episode."""
    episode = connection.execute(SELECT_WRITTEN, (episode_id,)).fetchone()
    return checksum(episode, connection.execute(SELECT_ALL_TURNS, (episode_id,)))


def _oldest(connection: sqlite3.Connection) -> int:
    live = connection.execute("SELECT min(id) FROM episodes WHERE evicted_by IS NULL")
    return live.fetchone()[0] or 0
