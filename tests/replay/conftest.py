"""Episodes with made-up but consistent content."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.episode import Episode, Turn


def _turn(rng: random.Random, last: bool) -> Turn:
    length = rng.randint(1, 8)
    ids = tuple(rng.randrange(50_000) for _ in range(length + 5))
    explored = rng.random() < 0.25
    logprobs = np.log(np.array([rng.random() for _ in range(length)], dtype="<f4")).tolist()
    return Turn(
        action=f"look {rng.random()}",
        completion=f"Thought: é\n<|im_end|>\x00 look {rng.random()}",
        delta_ids=ids,
        action_start=3,
        action_end=3 + length,
        logprobs=() if explored else tuple(logprobs),
        finish_reason="given" if explored else rng.choice(["stop", "length"]),
        policy_version=rng.randrange(5),
        explored=explored,
        replies=[{"role": "user", "content": "Sure 🙂", "name": "ann"}],
        reward=rng.choice([0.0, 0.1, 1.0]) if last else 0.0,
        terminated=last,
        truncated=False,
        info={"valid": True, "nested": {"error": None, "codes": [1, 2.5]}},
    )


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    """``make_episode(number, turns=3, **fields)``: equal numbers give equal episodes."""

    def make(number: int, turns: int = 3, **fields: object) -> Episode:
        rng = random.Random(number)
        episode = Episode(
            env="desk",
            task_id=f"refund-{number}",
            split="train",
            seed=number,
            codec="codec-a",
            opening=[
                {"role": "system", "content": "You serve customers."},
                {"role": "user", "content": f"Hello, order {number}"},
            ],
            opening_ids=tuple(rng.randrange(50_000) for _ in range(12)),
            turns=[_turn(rng, t == turns - 1) for t in range(turns)],
            reason="done" if rng.random() < 0.7 else "step_limit",
        )
        return replace(episode, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def fill(make_episode: Callable[..., Episode]) -> Callable[..., list[Episode]]:
    """``fill(buffer, turns)``: append an episode for each number of turns; return them."""

    def fill(buffer: ReplayBuffer, turns: list[int], first: int = 0) -> list[Episode]:
        episodes = [make_episode(first + i, n) for i, n in enumerate(turns)]
        for episode in episodes:
            buffer.append(episode)
        return episodes

    return fill
