"""Draws are reproducible, and as probable as they should be."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.sampler import TransitionSampler


@pytest.fixture
def buffer(tmp_path):
    with ReplayBuffer(tmp_path / "replay.sqlite") as buffer:
        yield buffer


def chi_square_accepts(counts, probabilities):
    """Whether counts fit at a significance of 1e-4 (Wilson and Hilferty's approximation)."""
    expected = np.asarray(probabilities) / np.sum(probabilities) * np.sum(counts)
    statistic = float(((np.asarray(counts) - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    spread = 2 / (9 * freedom)
    return statistic < freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def drawn(sampler, positions):
    return Counter(key for p in range(positions) for key in sampler.draw(p))


def test_uniform_over_transitions_not_over_episodes(buffer, fill):
    turns = [1, 2, 3, 10, 4]
    fill(buffer, turns)
    counts = drawn(TransitionSampler(buffer, 4), 1500)
    keys = [(i, t) for i, n in enumerate(turns, 1) for t in range(n)]
    assert set(counts) == set(keys)
    assert chi_square_accepts([counts[key] for key in keys], [1] * len(keys))
    by_episode = [sum(counts[i, t] for t in range(n)) for i, n in enumerate(turns, 1)]
    assert not chi_square_accepts(by_episode, [1] * len(turns))  # the test can tell


def test_groups_keep_transitions_equally_likely(buffer, fill):
    turns = [1, 2, 3, 10, 4] * 4
    fill(buffer, turns)
    # One group per batch, so that avoiding repeats within a batch does not matter.
    sampler = TransitionSampler(buffer, 3, transitions_per_episode=3)
    counts = Counter()
    for position in range(6000):
        counts.update(sampler._candidates(np.random.default_rng([position])))
    keys = [(i, t) for i, n in enumerate(turns, 1) for t in range(n)]
    assert chi_square_accepts([counts[key] for key in keys], [1] * len(keys))


def test_recency_halves_with_every_half_life(buffer, fill):
    fill(buffer, [2] * 12)
    sampler = TransitionSampler(buffer, 1, strategy="recency", recency_half_life=3)
    counts = drawn(sampler, 6000)
    keys = [(i, t) for i in range(1, 13) for t in range(2)]
    probabilities = [0.5 ** ((12 - i) / 3) for i, _ in keys]
    assert chi_square_accepts([counts[key] for key in keys], probabilities)
    assert not chi_square_accepts([counts[key] for key in keys], [1] * len(keys))


def test_draws_depend_on_seed_position_and_content_only(buffer, fill):
    fill(buffer, [4] * 10)
    sampler = TransitionSampler(buffer, 8, seed=1)
    batches = [sampler.draw(p) for p in range(20)]
    assert [sampler.draw(p) for p in reversed(range(20))] == batches[::-1]
    fresh = TransitionSampler(buffer, 8, seed=1)
    assert [fresh.draw(p) for p in range(20)] == batches
    assert len({tuple(batch) for batch in batches}) == 20
    assert [TransitionSampler(buffer, 8, seed=2).draw(p) for p in range(20)] != batches


def test_following_the_buffer_equals_reading_it_afresh(tmp_path, fill):
    """Appends, evictions and truncations, seen step by step or at once, give the same draws."""
    buffer = ReplayBuffer(tmp_path / "small.sqlite", capacity=30)
    fill(buffer, [3])
    followers = [
        TransitionSampler(buffer, 6, strategy=strategy, recency_half_life=4)
        for strategy in ("uniform", "recency")
    ]

    def compare():
        for follower in followers:
            strategy = "uniform" if math.isinf(follower.half_life) else "recency"
            fresh = TransitionSampler(buffer, 6, strategy=strategy, recency_half_life=4)
            assert follower.draw(5) == fresh.draw(5)

    for step in range(12):
        fill(buffer, [1 + step % 5, 2], first=10 * step)
        compare()
    buffer.truncate(buffer.high_water_mark - 3)
    fill(buffer, [5, 5, 5], first=500)  # same ids, other episodes
    compare()


def test_draws_read_only_new_episodes(buffer, fill):
    fill(buffer, [3] * 20)
    sampler = TransitionSampler(buffer, 4)
    fill(buffer, [3], first=20)
    read = []
    original = buffer.index
    buffer.index = lambda *args: read.append(original(*args)) or read[-1]
    sampler.draw(0)
    sampler.draw(1)
    assert [len(index.ids) for index in read] == [1, 0]


@pytest.mark.parametrize("per_episode", [1, 3])
@pytest.mark.parametrize("strategy", ["uniform", "recency"])
def test_batches_are_full_distinct_and_grouped(buffer, fill, per_episode, strategy):
    fill(buffer, [1, 5, 2, 8, 3, 6, 4] * 4)
    sampler = TransitionSampler(
        buffer, 16, strategy, recency_half_life=20, transitions_per_episode=per_episode
    )
    for position in range(50):
        batch = sampler.draw(position)
        assert len(batch) == len(set(batch)) == 16
        episodes = [key[0] for key in batch]
        starts = [i for i, e in enumerate(episodes) if i == 0 or episodes[i - 1] != e]
        assert len(starts) == len(set(episodes))  # an episode's turns stand together
        for start, end in zip(starts, [*starts[1:], 16], strict=True):
            assert batch[start:end] == sorted(batch[start:end])


def test_groups_take_several_turns_of_an_episode(buffer, fill):
    fill(buffer, [8] * 50)
    sampler = TransitionSampler(buffer, 16, transitions_per_episode=4)
    sizes = [len({i for i, _ in sampler.draw(p)}) for p in range(50)]
    assert max(sizes) == 4
    assert np.mean(sizes) > 3.5


def test_a_buffer_smaller_than_the_batch_repeats(buffer, fill):
    fill(buffer, [2, 1])
    for per_episode in (1, 2, 5):
        sampler = TransitionSampler(buffer, 10, transitions_per_episode=per_episode)
        batch = sampler.draw(0)
        assert len(batch) == 10
        assert set(batch) == {(1, 0), (1, 1), (2, 0)}


def test_steep_recency_still_fills_the_batch(buffer, fill):
    fill(buffer, [2] * 300)
    sampler = TransitionSampler(buffer, 16, "recency", recency_half_life=0.1)
    assert len(sampler.draw(0)) == 16


def test_an_empty_buffer_says_so(buffer, fill):
    sampler = TransitionSampler(buffer, 4)
    with pytest.raises(ConfigError, match=r"no transition to draw from.*collect episodes"):
        sampler.draw(0)
    fill(buffer, [4])
    assert len(sampler.draw(0)) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"batch_size": -3},
        {"strategy": "prioritised"},
        {"recency_half_life": 0.0},
        {"transitions_per_episode": 0},
        {"contrast_batches": -1},
        {"seed": -1},
    ],
)
def test_bad_settings_are_named(buffer, bad):
    with pytest.raises(ConfigError, match=rf"^data\.{next(iter(bad))}: "):
        TransitionSampler(buffer, **{"batch_size": 4, **bad})


def test_contrast_pairs_each_action_with_one_that_ended_otherwise(buffer, make_episode):
    """Ten episodes of one task part at the opening: half of the first actions lead to success."""
    blank = make_episode(0, turns=1)
    for i in range(10):
        turn = replace(blank.turns[0], action=f"go {i}", reward=float(i % 2))
        buffer.append(replace(blank, turns=[turn]))
    alone = make_episode(1, turns=3)
    buffer.append(alone)
    sampler = TransitionSampler(buffer, 2)
    pairs = Counter()
    for position in range(400):
        first, *rest = sampler._candidates(np.random.default_rng([position]), contrast=True)
        if first[0] == 11:
            assert not rest, "nothing else was tried there"
        else:
            ((other, t),) = rest
            assert t == 0 and other % 2 != first[0] % 2
            pairs[other] += 1
    assert set(pairs) == set(range(1, 11))
    first, again = (TransitionSampler(buffer, 8, contrast_batches=1) for _ in range(2))
    assert first.draw(0) == again.draw(0) and len(set(first.draw(0))) == 8
    assert first.draw(1) == TransitionSampler(buffer, 8).draw(1), "only the first batch has pairs"
