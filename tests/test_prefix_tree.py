"""Packed sequences give what each gives alone, and packs cover everything once."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.prefix_tree import pack_tree, split_packs

Sequences = list[list[int]]

# Few different ids: most sequences then share a prefix, are equal, or are prefixes of another.
trees = st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=7), min_size=1, max_size=7)


def prefixes(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


@pytest.fixture(scope="module")
def backbone(tiny_llama_path: str) -> Backbone:
    return Backbone(BackboneConfig(tiny_llama_path, lora_r=4, dtype="float32")).eval()


@pytest.fixture(scope="module")
def plain(tiny_llama_path: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32)
    return model.get_decoder().eval()


@settings(deadline=None)
@given(trees)
def test_each_distinct_prefix_is_one_token_that_sees_its_ancestors(sequences: Sequences) -> None:
    tree = pack_tree(sequences)
    assert len(tree.input_ids) == len(prefixes(sequences))
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.input_ids[path].tolist() == sequence
        assert tree.position_ids[path].tolist() == list(range(len(sequence)))
        for at, index in enumerate(path.tolist()):
            assert tree.mask[index].nonzero()[:, 0].tolist() == sorted(path[: at + 1].tolist())


@torch.no_grad()
@settings(max_examples=30, deadline=None)
@given(sequences=trees)
@example(sequences=[[5, 6, 7], [5, 6, 7], [5, 6], [5], [6], [5, 6, 7, 5]])
def test_hidden_states_equal_those_of_each_sequence_alone(
    backbone: Backbone, plain: torch.nn.Module, sequences: Sequences
) -> None:
    tree = pack_tree(sequences)
    with backbone.use("base"):
        hidden = backbone.forward_tree(tree)
    for n, sequence in enumerate(sequences):
        alone = plain(torch.tensor([sequence])).last_hidden_state[0]
        torch.testing.assert_close(
            hidden[tree.rows(n, 0, len(sequence))], alone, atol=1e-5, rtol=1e-5
        )


@torch.no_grad()
@settings(max_examples=30, deadline=None)
@given(known=trees, sequences=trees)
@example(known=[[5, 6, 7]], sequences=[[5, 6, 7], [5, 6, 7], [5, 6, 5], [7], [5]])
def test_cached_prefixes_give_the_same_states(
    backbone: Backbone, plain: torch.nn.Module, known: Sequences, sequences: Sequences
) -> None:
    first = pack_tree(known)
    index = {
        tuple(k[: n + 1]): int(i)
        for k, path in zip(known, first.paths, strict=True)
        for n, i in enumerate(path)
    }
    cached = [
        np.array([index[p] for n in range(1, len(s)) if (p := tuple(s[:n])) in index], np.int64)
        for s in sequences
    ]
    cache = DynamicCache()
    with backbone.use("base"):
        backbone.forward_tree(first, cache)
        tree = pack_tree(sequences, cached, len(first.input_ids))
        hidden = backbone.forward_tree(tree, cache)
    assert len(tree.input_ids) <= len(prefixes(sequences))
    for n, (sequence, some) in enumerate(zip(sequences, cached, strict=True)):
        alone = plain(torch.tensor([sequence])).last_hidden_state[0, len(some) :]
        rows = tree.rows(n, len(some), len(sequence))
        torch.testing.assert_close(hidden[rows], alone, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(trees, st.integers(1, 20))
def test_packs_cover_each_sequence_once_within_the_limit(sequences: Sequences, limit: int) -> None:
    packs = list(split_packs(sequences, limit))
    assert sorted(i for pack in packs for i in pack) == list(range(len(sequences)))
    for pack in packs:
        # Alone in a pack, or together within the limit; duplicates of a long one cost nothing.
        distinct = len(prefixes([sequences[i] for i in pack]))
        assert distinct <= max(limit, len(sequences[pack[0]]))


def test_no_sequences_make_no_packs() -> None:
    assert list(split_packs([], 10)) == []
