"""Packing token sequences as a tree, so that each distinct token is processed once.

Sequences that start alike share the tokens of their common prefix. A pack is one row of tokens in
which every token attends to its own ancestors only, at the position it has in its own sequence:
the result for each sequence equals that of running it alone. Generation and training both use it;
``cached`` adds tokens whose keys and values are already known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nlac_lightning.tree_attention import Block, make_blocks


@dataclass(frozen=True)
class PackedTree:
    """One row of tokens holding several sequences.

    Attributes:
        input_ids: [new] token ids to process.
        position_ids: [new] position of each token in its own sequence.
        mask: [new, cached + new] bool, True where a token may attend.
        paths: for each sequence, the indices of its tokens among the cached + new ones.
        cached: number of tokens whose keys and values are given.
        blocks: the mask as blocks, where that saves work; else empty.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    paths: list[Tensor]
    cached: int = 0
    blocks: tuple[Block, ...] = ()

    def rows(self, sequence: int, start: int, end: int) -> Tensor:
        """Indices among the new tokens of ``start`` to ``end`` (exclusive) of a sequence."""
        return self.paths[sequence][start:end] - self.cached


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def pack_tree(
    sequences: Sequence[Sequence[int]],
    cached: Sequence[np.ndarray] | None = None,
    num_cached: int = 0,
) -> PackedTree:
    """Pack sequences into one row.

    Args:
        sequences: token ids; the order is kept in ``paths``, equal ones share everything.
        cached: for each sequence, the indices of its first tokens among ``num_cached`` known ones.
            At least the last token of each sequence has to be new. All others are processed.
        num_cached: how many known tokens there are.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    paths: list[np.ndarray] = [np.empty(0, np.int64)] * len(arrays)
    blocks: list[tuple[int, int, np.ndarray]] = []
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    size = 0
    previous: int | None = None
    for i in lexical_order(sequences):
        known = cached[i] if cached is not None else np.empty(0, np.int64)
        shared = 0 if previous is None else common_prefix(arrays[previous], arrays[i])
        head = known
        if previous is not None and shared > len(known):
            more = paths[previous][len(known) : shared]
            if (more >= num_cached).all():  # else the states of some of these are not computed
                head = np.concatenate([known, more])
        new = len(arrays[i]) - len(head)
        path = np.concatenate([head, np.arange(size, size + new) + num_cached])
        blocks.append((size, size + new, head))
        ids.append(arrays[i][len(head) :])
        positions.append(np.arange(len(head), len(arrays[i])))
        paths[i] = path
        size += new
        previous = i
    mask = torch.zeros(size, num_cached + size, dtype=torch.bool)
    for start, end, head in blocks:
        mask[start:end, torch.from_numpy(head)] = True
        mask[start:end, num_cached + start : num_cached + end] = torch.ones(
            end - start, end - start, dtype=torch.bool
        ).tril()
    return PackedTree(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        mask=mask,
        paths=[torch.from_numpy(path) for path in paths],
        cached=num_cached,
        blocks=make_blocks(
            [(start, end, torch.from_numpy(head)) for start, end, head in blocks], num_cached, size
        ),
    )


def lexical_order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Indices that sort the sequences, so that neighbours share the longest prefixes."""
    return sorted(range(len(sequences)), key=lambda i: tuple(sequences[i]))


def split_packs(sequences: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of the sequences that go into each pack.

    A pack holds at most ``max_tokens`` distinct tokens, or one sequence that is longer. Attention
    costs the square of a pack, the common prefix is paid once a pack.
    """
    pack: list[int] = []
    tokens = 0
    previous: np.ndarray | None = None
    for i in lexical_order(sequences):
        array = np.asarray(sequences[i], dtype=np.int64)
        shared = common_prefix(previous, array) if previous is not None else 0
        new = len(array) - shared
        if pack and tokens + new > max_tokens:
            yield pack
            pack, tokens, new = [], 0, len(array)
        pack.append(i)
        tokens += new
        previous = array
    if pack:
        yield pack
