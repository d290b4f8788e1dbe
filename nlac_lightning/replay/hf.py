"""Episodes as a ``datasets.Dataset`` or a Parquet file, one row each, and back without loss.

A row is self-contained: it names its environment and codec. Messages and info are JSON strings,
since their fields differ from environment to environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.replay.schema import dump, load_messages

FEATURES = Features(
    {
        "env": Value("string"),
        "task_id": Value("string"),
        "split": Value("string"),
        "seed": Value("int64"),
        "codec": Value("string"),
        "reason": Value("string"),
        "opening": Value("string"),
        "opening_ids": List(Value("int32")),
        "turns": List(
            {
                "action": Value("string"),
                "completion": Value("string"),
                "delta_ids": List(Value("int32")),
                "action_start": Value("int32"),
                "action_end": Value("int32"),
                "logprobs": List(Value("float32")),
                "finish_reason": Value("string"),
                "policy_version": Value("int64"),
                "explored": Value("bool"),
                "replies": Value("string"),
                "reward": Value("float64"),
                "terminated": Value("bool"),
                "truncated": Value("bool"),
                "info": Value("string"),
            }
        ),
    }
)
"""Columns of an exported buffer."""

CHUNK = 256
"""Episodes in memory at a time."""


def to_dataset(episodes: Iterable[Episode]) -> Dataset:
    """All episodes as one dataset in memory; :func:`export_parquet` is for large buffers."""
    return Dataset.from_list([_to_row(episode) for episode in episodes], features=FEATURES)


def from_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Episode]:
    """Episodes from the rows of :func:`to_dataset` or an exported file.

    Raises ValueError, naming the row, where one is not an episode.
    """
    for number, row in enumerate(rows):
        try:
            episode = _from_row(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"row {number} is not an episode ({error})") from error
        yield episode


def export_parquet(buffer: ReplayBuffer, path: str | Path) -> int:
    """Write all episodes to ``path``, which appears only when complete; return their number.

    Raises ConfigError if ``path`` cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    schema = FEATURES.arrow_schema
    episodes, count = buffer.iter_episodes(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, schema) as writer:
            while rows := [_to_row(episode) for episode in islice(episodes, CHUNK)]:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                count += len(rows)
        os.replace(partial, path)
    except OSError as error:
        fix = "name a file in a folder where you may write"
        raise ConfigError(str(path), f"cannot be written ({error})", fix) from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def import_dataset(buffer: ReplayBuffer, dataset: Dataset) -> int:
    """Append all episodes of ``dataset``; return their number. See :func:`import_parquet`."""
    if dataset.features != FEATURES:
        raise _not_exported("dataset", "its columns are not those of an exported buffer")
    return _store(buffer, dataset, "dataset")


def import_parquet(buffer: ReplayBuffer, path: str | Path) -> int:
    """Append all episodes of a Parquet file to ``buffer``, or none; return their number.

    Raises:
        ConfigError: not an exported buffer, or of another codec or environment than ``buffer``.
        BufferWriteError: the buffer's file could not be written.
    """
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise _not_exported(str(path), f"not a readable Parquet file ({error})") from error
    with file:
        if Features.from_arrow_schema(file.schema_arrow) != FEATURES:
            raise _not_exported(str(path), "its columns are not those of an exported buffer")
        batches = file.iter_batches(batch_size=CHUNK)
        return _store(buffer, (row for batch in batches for row in batch.to_pylist()), str(path))


def _store(buffer: ReplayBuffer, rows: Iterable[Mapping[str, Any]], source: str) -> int:
    try:
        return len(buffer.append_many(from_rows(rows)))
    except ConfigError:
        raise
    except ValueError as error:
        raise _not_exported(source, str(error)) from error


def _not_exported(source: str, problem: str) -> ConfigError:
    return ConfigError(source, problem, "import what `nlac replay export` or to_dataset wrote")


def _to_row(episode: Episode) -> dict[str, Any]:
    row = {name: getattr(episode, name) for name in FEATURES if name not in ("opening", "turns")}
    row["opening"] = dump(episode.opening)
    row["turns"] = [
        {**vars(turn), "replies": dump(turn.replies), "info": dump(turn.info)}
        for turn in episode.turns
    ]
    return row


def _from_row(row: Mapping[str, Any]) -> Episode:
    return Episode(
        **{
            **row,
            "opening": load_messages(row["opening"]),
            "opening_ids": tuple(row["opening_ids"]),
            "turns": [_from_struct(turn) for turn in row["turns"]],
        }
    )


def _from_struct(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        **{
            **turn,
            "delta_ids": tuple(turn["delta_ids"]),
            "logprobs": tuple(turn["logprobs"]),
            "replies": load_messages(turn["replies"]),
            "info": json.loads(turn["info"]),
        }
    )
