"""The three levels: how worlds are drawn, and how hard they must be to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nlac_lightning.envs.language_mdp.exact import ExactWorld, State
from nlac_lightning.envs.language_mdp.solve import success_rate
from nlac_lightning.envs.language_mdp.world import Shape, World, draw_world
from nlac_lightning.errors import ConfigError

SHARES = {"train": 3, "val": 1, "test": 1}
"""Of every five (start, goal) pairs, how many go to each split."""
MAX_DRAWS = 2_000


@dataclass(frozen=True)
class Level:
    """A shape of worlds, and exact bounds on what succeeds without learning.

    Attributes:
        shape: what worlds are drawn from.
        least: lowest success rate of the uniform policy over all tasks, so that a learner sees
            successes at all.
        uniform, heuristic: highest success rate of these two policies in any split.
        min_pairs: fewest (start, goal) pairs.
    """

    shape: Shape
    least: float
    uniform: float
    heuristic: float
    min_pairs: int


LEVELS: Mapping[int, Level] = {
    1: Level(
        Shape(rooms=20, exits=3, stride=7, traps=0.05, goals=1, survival=0.97),
        least=0.07,
        uniform=0.15,
        heuristic=0.4,
        min_pairs=10,
    ),
    2: Level(
        Shape(rooms=24, exits=3, stride=6, traps=0.1, goals=2, survival=0.97),
        least=0.02,
        uniform=0.05,
        heuristic=0.2,
        min_pairs=20,
    ),
    3: Level(
        Shape(rooms=30, exits=3, stride=7, traps=0.15, goals=3, survival=0.97),
        least=0.006,
        uniform=0.02,
        heuristic=0.1,
        min_pairs=30,
    ),
}


@dataclass(frozen=True)
class LevelWorld:
    """A world that keeps a level's bounds, with its tasks by split and its exact solution."""

    exact: ExactWorld
    splits: Mapping[str, tuple[State, ...]]


def make_world(level: int, seed: int) -> LevelWorld:
    """The world of a level and a seed: the first draw that keeps the level's bounds.

    Raises:
        ConfigError: no such level, or a seed without a fitting world.
    """
    if level not in LEVELS:
        raise ConfigError("env.level", f"{level} is unknown", "use 1, 2 or 3")
    spec = LEVELS[level]
    rng = np.random.default_rng([level, seed])
    for _ in range(MAX_DRAWS):
        world = draw_world(spec.shape, rng)
        splits = split_pairs(world, rng)
        exact = ExactWorld(world, sum(splits.values(), ()))
        if _fits(spec, exact, splits):
            return LevelWorld(exact, splits)
    raise ConfigError("env.seed", f"{seed} yields no world of level {level}", "use another seed")


def split_pairs(world: World, rng: np.random.Generator) -> dict[str, tuple[State, ...]]:
    """Deal the (start, goal) pairs to the splits, which share none.

    Pairs are dealt in order of distance, so every split has near and far ones.
    """
    pairs = world.pairs()
    dealt: dict[str, list[State]] = {split: [] for split in SHARES}
    hand = [split for split, share in SHARES.items() for _ in range(share)]
    for i in range(0, len(pairs), len(hand)):
        for pair, j in zip(pairs[i : i + len(hand)], rng.permutation(len(hand)), strict=False):
            dealt[hand[j]].append(pair)
    return {split: tuple(some) for split, some in dealt.items()}


def _fits(spec: Level, exact: ExactWorld, splits: Mapping[str, tuple[State, ...]]) -> bool:
    asked = {goal for _, goal in exact.starts}
    if len(exact.starts) < spec.min_pairs or asked != set(exact.world.goals):
        return False
    if not all(splits.values()) or not exact.world.has_traps():
        return False
    if success_rate(exact.mdp, exact.mdp.uniform()) < spec.least:
        return False
    parts = [exact.restricted(starts) for starts in splits.values()]
    return all(
        success_rate(part.mdp, part.mdp.uniform()) <= spec.uniform
        and success_rate(part.mdp, part.heuristic()) <= spec.heuristic
        for part in parts
    )
