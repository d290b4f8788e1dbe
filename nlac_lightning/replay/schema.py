"""The buffer's tables, and how an episode becomes rows and comes back.

Token ids are little-endian int32 blobs and log-probabilities float32 blobs. Text and messages are
JSON in ASCII, which also carries characters that UTF-8 refuses (lone surrogates in tool results).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from nlac_lightning.envs.base import Message
from nlac_lightning.replay.episode import Episode, Turn

APPLICATION_ID = 0x4E4C4143
"""Marks the SQLite file as a replay buffer (``PRAGMA application_id``)."""

SCHEMA_VERSION = 3
"""Raised by one with every change of the tables (``PRAGMA user_version``)."""

# `state` is a hash of a task and a state in it, `way` of these and an action: turns of equal way
# did the same in the same place, whatever came after.
# An evicted episode stays on disk, marked with the episode that displaced it, until that one is
# evicted too: resuming from a checkpoint can then undo evictions that happened after it.
TABLES = """
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    codec TEXT,
    env TEXT,
    last_id INTEGER NOT NULL,
    transitions INTEGER NOT NULL,
    truncations INTEGER NOT NULL
);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    split TEXT NOT NULL,
    seed INTEGER NOT NULL,
    reason TEXT NOT NULL,
    opening TEXT NOT NULL,
    opening_ids BLOB NOT NULL,
    num_turns INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    total_reward REAL NOT NULL,
    evicted_by INTEGER,
    checksum INTEGER
);
CREATE INDEX live_episodes ON episodes (id, num_turns) WHERE evicted_by IS NULL;
CREATE INDEX evicted_episodes ON episodes (evicted_by) WHERE evicted_by IS NOT NULL;
CREATE TABLE turns (
    episode_id INTEGER NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
    t INTEGER NOT NULL,
    text TEXT NOT NULL,
    delta_ids BLOB NOT NULL,
    action_start INTEGER NOT NULL,
    action_end INTEGER NOT NULL,
    logprobs BLOB NOT NULL,
    policy_version INTEGER NOT NULL,
    explored INTEGER NOT NULL,
    reward REAL NOT NULL,
    terminated INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    return_to_go REAL NOT NULL,
    state INTEGER NOT NULL,
    way INTEGER NOT NULL,
    PRIMARY KEY (episode_id, t)
);
CREATE INDEX states ON turns (state);
CREATE INDEX ways ON turns (way, return_to_go);
INSERT INTO meta VALUES (1, NULL, NULL, 0, 0, 0);
"""

INSERT_EPISODE = "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)"
INSERT_TURN = "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
SELECT_EPISODE = """SELECT task_id, split, seed, reason, opening, opening_ids, num_turns
    FROM episodes WHERE id = ? AND evicted_by IS NULL"""
SELECT_TURNS = """SELECT text, delta_ids, action_start, action_end, logprobs, policy_version,
    explored, reward, terminated, truncated FROM turns WHERE episode_id = ? ORDER BY t"""
SELECT_WRITTEN = """SELECT id, task_id, split, seed, reason, opening, opening_ids, num_turns,
    num_tokens, total_reward FROM episodes WHERE id = ?"""
SELECT_ALL_TURNS = "SELECT * FROM turns WHERE episode_id = ? ORDER BY t"
SELECT_BEST_RETURN = """SELECT max(return_to_go) FROM turns
    WHERE way = (SELECT way FROM turns WHERE episode_id = ? AND t = ?)"""
SELECT_ALTERNATIVES = """SELECT max(episode_id), t, best FROM (
        SELECT turns.*, max(return_to_go) OVER (PARTITION BY way) AS best FROM turns
        WHERE state = (SELECT state FROM turns WHERE episode_id = ? AND t = ?))
    JOIN episodes ON id = episode_id WHERE evicted_by IS NULL GROUP BY way ORDER BY 1"""


def validate(episode: Episode) -> None:
    """Raise ValueError, naming the turn, for an episode that could not be trained on."""
    if not episode.turns:
        raise ValueError(f"episode of task '{episode.task_id}' has no turn")
    for t, turn in enumerate(episode.turns):
        where = f"episode of task '{episode.task_id}', turn {t}"
        if not 0 <= turn.action_start <= turn.action_end <= len(turn.delta_ids):
            raise ValueError(f"{where}: the action's span does not lie inside delta_ids")
        if len(turn.logprobs) not in (0, len(turn.action_ids)):
            counts = f"{len(turn.logprobs)} logprobs for {len(turn.action_ids)} ids"
            raise ValueError(f"{where}: {counts}")
        if not math.isfinite(turn.reward):
            raise ValueError(f"{where}: reward {turn.reward} is not finite")


def checksum(episode: Sequence[Any], turns: Iterable[Sequence[Any]]) -> int:
    """64-bit hash of an episode's rows of ``SELECT_WRITTEN`` and ``SELECT_ALL_TURNS``.

    SQLite keeps none of its own, so a flipped bit in a text or in ids would go unseen.
    """
    digest = blake2b(repr(tuple(episode)).encode(), digest_size=8)
    for turn in turns:
        digest.update(repr(tuple(turn)).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def dump(value: object) -> str:
    """JSON of messages or info; TypeError names a value that JSON cannot hold."""
    return json.dumps(value, separators=(",", ":"))


def load_messages(text: str) -> list[Message]:
    """Messages from JSON; ValueError if it is anything but a list of chat messages."""
    messages = json.loads(text)
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    ):
        raise ValueError("not a list of chat messages with role and content")
    return messages


def pack(values: Sequence[int] | Sequence[float], dtype: str) -> bytes:
    """Numbers as a blob: ``<i4`` for ids (OverflowError beyond 32 bits), ``<f4`` for logprobs."""
    return np.asarray(values, dtype=dtype).tobytes()


def unpack(blob: bytes, dtype: str) -> tuple[Any, ...]:
    """The numbers of a blob as a tuple of Python numbers."""
    return tuple(np.frombuffer(blob, dtype=dtype).tolist())


def episode_row(episode: Episode, episode_id: int) -> tuple[Any, ...]:
    """Values for ``INSERT_EPISODE``."""
    return (
        episode_id,
        episode.task_id,
        episode.split,
        episode.seed,
        episode.reason,
        dump(episode.opening),
        pack(episode.opening_ids, "<i4"),
        len(episode.turns),
        len(episode.opening_ids) + sum(len(turn.delta_ids) for turn in episode.turns),
        episode.total_reward,
    )


def turn_rows(episode: Episode, episode_id: int) -> Iterator[tuple[Any, ...]]:
    """Values for ``INSERT_TURN``, one tuple per turn."""
    rewards = [turn.reward for turn in episode.turns]
    way = blake2b(f"{episode.split}/{episode.task_id}".encode(), digest_size=8)
    way.update(pack(episode.opening_ids, "<i4"))
    for t, turn in enumerate(episode.turns):
        state, here = way.digest(), way.copy()
        here.update(turn.action.encode(errors="surrogatepass"))
        way.update(pack(turn.delta_ids, "<i4"))
        text = {
            "action": turn.action,
            "completion": turn.completion,
            "finish_reason": turn.finish_reason,
            "replies": turn.replies,
            "info": turn.info,
        }
        yield (
            episode_id,
            t,
            dump(text),
            pack(turn.delta_ids, "<i4"),
            turn.action_start,
            turn.action_end,
            pack(turn.logprobs, "<f4"),
            turn.policy_version,
            turn.explored,
            turn.reward,
            turn.terminated,
            turn.truncated,
            sum(rewards[t:]),
            int.from_bytes(state, "little", signed=True),
            int.from_bytes(here.digest(), "little", signed=True),
        )


def decode_turn(row: tuple[Any, ...]) -> Turn:
    """A turn from a row of ``SELECT_TURNS``."""
    text, delta_ids, start, end, logprobs, version, explored, reward, terminated, truncated = row
    return Turn(
        **json.loads(text),
        delta_ids=unpack(delta_ids, "<i4"),
        action_start=start,
        action_end=end,
        logprobs=unpack(logprobs, "<f4"),
        policy_version=version,
        explored=bool(explored),
        reward=reward,
        terminated=bool(terminated),
        truncated=bool(truncated),
    )


def decode_episode(
    row: tuple[Any, ...], turns: Sequence[tuple[Any, ...]], codec: str, env: str
) -> Episode:
    """An episode from its row of ``SELECT_EPISODE`` and those of its turns.

    Raises ValueError if turns are missing.
    """
    task_id, split, seed, reason, opening, opening_ids, num_turns = row
    if len(turns) != num_turns:
        raise ValueError(f"{len(turns)} turns stored, {num_turns} expected")
    return Episode(
        env=env,
        task_id=task_id,
        split=split,
        seed=seed,
        codec=codec,
        opening=load_messages(opening),
        opening_ids=unpack(opening_ids, "<i4"),
        turns=[decode_turn(turn) for turn in turns],
        reason=reason,
    )
