"""What ``nlac replay stats|check|export|import|salvage`` do; each returns what to print."""

from __future__ import annotations

import sys
from pathlib import Path

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.hf import export_parquet, import_parquet
from nlac_lightning.replay.salvage import salvage


def stats(path: str | Path) -> str:
    """Table of what the buffer at ``path`` holds; ConfigError if there is none."""
    with ReplayBuffer(path, read_only=True) as buffer:
        stats = buffer.stats()
    low, high = stats.policy_versions or ("-", "-")
    rows = {
        "environment": stats.env or "-",
        "codec": stats.codec or "-",
        "episodes": f"{stats.episodes:,}",
        "transitions": f"{stats.transitions:,}",
        "success rate": f"{stats.success_rate:.3f}",
        "mean turns": f"{stats.mean_turns:.2f}",
        "tokens": f"{stats.tokens:,}",
        "explored actions": f"{stats.explored:.3f}",
        "policy versions": f"{low} to {high}",
        "file size": f"{stats.file_bytes / 2**20:.2f} MiB",
        **{f"ended by {reason}": f"{n:,}" for reason, n in stats.reasons.items()},
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def export(path: str | Path, out: str | Path) -> str:
    """Write the buffer at ``path`` to the Parquet file ``out``."""
    with ReplayBuffer(path, read_only=True) as buffer:
        count = export_parquet(buffer, out)
    return f"{count:,} episodes written to {out}"


def import_episodes(path: str | Path, source: str | Path) -> str:
    """Append the Parquet file ``source`` to the buffer at ``path``, created if missing.

    Nothing is evicted; the next run that appends applies its own capacity.
    """
    if not Path(source).is_file():
        raise ConfigError(str(source), "no such file", "name a file from `nlac replay export`")
    with ReplayBuffer(path, capacity=sys.maxsize) as buffer:
        count = import_parquet(buffer, source)
        total = buffer.num_episodes
    return f"{count:,} episodes added to {path}, which now holds {total:,}"


def check(path: str | Path) -> list[str]:
    """What is wrong with the buffer at ``path``, one sentence each; empty if it is sound."""
    try:
        with ReplayBuffer(path, read_only=True) as buffer:
            return buffer.problems()
    except ConfigError as error:
        return [str(error)]


def salvage_episodes(path: str | Path, out: str | Path) -> str:
    """Copy the whole episodes of the damaged buffer at ``path`` to the new file ``out``."""
    kept, lost = salvage(Path(path), Path(out))
    return f"{kept:,} whole episodes copied to {out}; {lost:,} damaged ones left behind"
