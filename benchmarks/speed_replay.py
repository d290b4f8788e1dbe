"""Row (f): the replay buffer by size."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from speed_common import Row, clock, in_child

from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.replay.sampler import TransitionSampler

DRAWS, BATCH, TURNS = 50, 32, 10


def measure(size: int) -> dict[str, float]:
    """Inserts and samples per second of a buffer that is filled up to ``size`` transitions."""
    turn = Turn(
        action="act", completion="act", delta_ids=tuple(range(100)), action_start=10,
        action_end=30, logprobs=(-0.5,) * 20, finish_reason="stop", policy_version=0,
        explored=False, replies=[{"role": "user", "content": "go on"}], reward=0.0,
        terminated=False, truncated=False, info={},
    )  # fmt: skip
    episode = Episode(
        env="speed", task_id="0", split="train", seed=0, codec="speed",
        opening=[{"role": "user", "content": "hello"}], opening_ids=tuple(range(1000)),
        turns=[turn] * TURNS, reason="done",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "replay.sqlite")
        with ReplayBuffer(path, capacity=size) as buffer:
            began = clock()
            for _ in range(size // 1000):
                buffer.append_many([episode] * (1000 // TURNS))
            filled = clock() - began
            sampler = TransitionSampler(buffer, batch_size=BATCH)
            buffer.transitions(sampler.draw(0))
            began = clock()
            for position in range(1, DRAWS + 1):
                buffer.transitions(sampler.draw(position))
            drawn = clock() - began
            disk = sum(file.stat().st_size for file in path.parent.iterdir()) / 2**20
    return {"inserts": size / filled, "samples": DRAWS * BATCH / drawn, "disk": disk}


def replay_rows(sizes: Sequence[int]) -> list[Row]:
    """(f)."""
    settings = f"{TURNS} turns an episode, 1,000 + 100 tokens a turn, batches of {BATCH}"
    rows = []
    for size in sizes:
        found, peak = in_child(partial(measure, size))
        rows += [
            Row(f"(f) inserts at {size:,}", found["inserts"], "transitions/s", settings),
            Row(f"(f) samples at {size:,}", found["samples"], "transitions/s", settings),
            Row(f"(f) memory added at {size:,}", peak, "MiB", settings),
            Row(f"(f) disk at {size:,}", found["disk"], "MiB", settings),
        ]
    return rows
