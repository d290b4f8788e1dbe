"""The prefix cache against a plain set of prefixes: right keys and values, a bound that holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nlac_lightning.generation.radix import RadixCache, gather

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def kv_of(ids: tuple[int, ...], start: int = 0) -> Tensor:
    """[layers=2, 2, heads=1, tokens, dim=1]: each value depends on the whole prefix."""
    codes = [hash(ids[: n + 1]) % 1_000_003 for n in range(start, len(ids))]
    return torch.tensor(codes, dtype=torch.float64).expand(2, 2, 1, -1)[..., None].clone()


def known(cache: RadixCache, ids: tuple[int, ...], limit: int | None = None) -> int:
    """Length of the known prefix; its keys and values are checked on the way."""
    found = cache.match(ids, limit)
    length = sum(n for _, n in found)
    if found:
        kv = gather({id(node): (node, n) for node, n in found})
        assert torch.equal(kv, kv_of(ids[:length]))
    return length


def put(cache: RadixCache, ids: tuple[int, ...]) -> None:
    """Insert as a generator does: only what is not known comes with keys and values."""
    cache.insert(ids, kv_of(ids, known(cache, ids)))


def held(cache: RadixCache) -> int:
    stack, total = [cache.root], 0
    while stack:
        node = stack.pop()
        total += len(node.ids)
        assert node is cache.root or (node.kv is not None and node.kv.shape[3] == len(node.ids))
        assert all(child.parent is node for child in node.children.values())
        stack.extend(node.children.values())
    return total


@settings(deadline=None)
@given(sequences, sequences)
def test_the_longest_known_prefix_comes_back(
    stored: list[list[int]], asked: list[list[int]]
) -> None:
    cache = RadixCache(1000)
    prefixes = {()}
    for ids in map(tuple, stored):
        put(cache, ids)
        prefixes |= {ids[: n + 1] for n in range(len(ids))}
    assert cache.tokens == held(cache) == len(prefixes) - 1
    for ids in map(tuple, asked):
        longest = max(n for n in range(len(ids) + 1) if ids[:n] in prefixes)
        assert known(cache, ids) == longest
        assert known(cache, ids, len(ids) - 1) == min(longest, len(ids) - 1)


@settings(deadline=None)
@given(sequences, st.integers(0, 6))
def test_the_bound_holds_and_what_stays_is_right(stored: list[list[int]], bound: int) -> None:
    cache = RadixCache(bound)
    for ids in map(tuple, stored):
        put(cache, ids)
        cache.trim()
        assert cache.tokens == held(cache) <= bound
    for ids in map(tuple, stored):
        assert known(cache, ids) <= len(ids)


def test_the_least_recently_used_branch_goes_first() -> None:
    cache = RadixCache(5)
    put(cache, (1, 2, 3))
    put(cache, (1, 4))
    known(cache, (1, 2, 3))
    put(cache, (1, 5))
    put(cache, (6,))
    assert cache.tokens == 6
    cache.trim()
    assert known(cache, (1, 2, 3)) == 3 and known(cache, (1, 5)) == 2
    assert known(cache, (1, 4)) == 1, "only the end of the oldest branch is dropped"


def test_what_hangs_on_an_evicted_beginning_is_not_stored() -> None:
    cache = RadixCache(100)
    cache.insert((1, 2, 3, 4), kv_of((1, 2, 3, 4), 2))
    assert cache.tokens == 0 and known(cache, (1, 2, 3, 4)) == 0


def test_clear_forgets() -> None:
    cache = RadixCache(100)
    put(cache, (1, 2))
    cache.clear()
    assert cache.tokens == 0 and known(cache, (1, 2)) == 0


@pytest.mark.parametrize("order", [[(1, 2, 3), (1, 2), (1, 4)], [(1, 4), (1, 2), (1, 2, 3)]])
def test_inserting_twice_changes_nothing(order: list[tuple[int, ...]]) -> None:
    cache = RadixCache(100)
    for ids in order * 2:
        put(cache, ids)
    assert cache.tokens == held(cache) == 4
