"""Figures about a buffer's content, computed in the database."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BufferStats:
    """What a buffer holds. Shares lie in [0, 1] and are 0 for an empty buffer.

    Attributes:
        env, codec: what the episodes belong to; None for an empty buffer.
        success_rate: share of episodes with a total reward above 0.
        tokens: openings and turns together.
        explored: share of transitions whose action came from exploration.
        reasons: number of episodes by why they ended, most frequent first.
        policy_versions: lowest and highest that acted; None for an empty buffer.
        file_bytes: size on disk, write-ahead log included.
    """

    env: str | None
    codec: str | None
    episodes: int
    transitions: int
    success_rate: float
    mean_turns: float
    tokens: int
    explored: float
    reasons: dict[str, int]
    policy_versions: tuple[int, int] | None
    file_bytes: int


def summarise(connection: sqlite3.Connection, path: Path) -> BufferStats:
    """Read every row once; ``path`` is the file behind ``connection``."""
    codec, env = connection.execute("SELECT codec, env FROM meta").fetchone()
    episodes, transitions, tokens, successes = connection.execute(
        """SELECT count(*), coalesce(sum(num_turns), 0), coalesce(sum(num_tokens), 0),
        coalesce(sum(total_reward > 0), 0) FROM episodes WHERE evicted_by IS NULL"""
    ).fetchone()
    explored, lowest, highest = connection.execute(
        """SELECT coalesce(sum(explored), 0), min(policy_version), max(policy_version)
        FROM turns JOIN episodes ON id = episode_id WHERE evicted_by IS NULL"""
    ).fetchone()
    reasons = connection.execute(
        """SELECT reason, count(*) FROM episodes WHERE evicted_by IS NULL
        GROUP BY reason ORDER BY count(*) DESC, reason"""
    ).fetchall()
    files = (path, path.with_name(path.name + "-wal"))
    return BufferStats(
        env=env,
        codec=codec,
        episodes=episodes,
        transitions=transitions,
        success_rate=successes / max(episodes, 1),
        mean_turns=transitions / max(episodes, 1),
        tokens=tokens,
        explored=explored / max(transitions, 1),
        reasons=dict(reasons),
        policy_versions=None if lowest is None else (lowest, highest),
        file_bytes=sum(file.stat().st_size for file in files if file.exists()),
    )
