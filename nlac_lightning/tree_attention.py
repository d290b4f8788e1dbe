"""Attention over a packed tree, block by block, for models of transformers.

A dense mask makes every token pay for all tokens of a pack. Here each branch reads its own
ancestors only, so the cost is that of the tree: it grows with the tokens of a pack, not with their
square. Registered under :data:`NAME` beside transformers' own kernels; calls without blocks are
plain ``sdpa``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "nlac_tree"
GAIN = 1.5
"""Blocks are used where they save this factor of query-key pairs: each has a fixed cost."""


@dataclass(frozen=True)
class Block:
    """A run of new tokens that are one another's ancestors.

    Attributes:
        start, end: its place among the new tokens.
        keys: [k] what the run's last token sees, among the cached + new tokens; None: the run
            itself and no more.
        mask: [end - start, k] bool, True where a token may attend; None is causal.
    """

    start: int
    end: int
    keys: Tensor | None
    mask: Tensor | None

    def to(self, device: torch.device) -> Block:
        """The block with its tensors on ``device``."""
        if self.keys is None or self.mask is None:
            return self
        return Block(self.start, self.end, self.keys.to(device), self.mask.to(device))


def make_blocks(
    runs: Sequence[tuple[int, int, Tensor]], cached: int, new: int
) -> tuple[Block, ...]:
    """Blocks of runs ``(start, end, head)``; none where a dense mask costs little more.

    Args:
        runs: see :class:`Block`; ``head`` holds the indices of the ancestors before the run.
        cached, new: numbers of known and of new tokens.
    """
    pairs = sum((end - start) * (len(head) + end - start) for start, end, head in runs)
    if new * (cached + new) < GAIN * pairs:
        return ()
    blocks = []
    for start, end, head in runs:
        if end == start:  # a sequence that another one holds whole
            continue
        own = torch.arange(cached + start, cached + end)
        if len(head) == cached == 0:
            blocks.append(Block(start, end, None, None))
            continue
        past = torch.ones(end - start, len(head), dtype=torch.bool)
        causal = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        blocks.append(Block(start, end, torch.cat([head, own]), torch.cat([past, causal], 1)))
    return tuple(blocks)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree_blocks: Sequence[Block] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [1, new, heads, d] of transformers' interface; shapes as there."""
    if not tree_blocks:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = []
    for block in tree_blocks:
        part = query[:, :, block.start : block.end]
        if block.keys is None:
            k, v = (x[:, :, block.start : block.end] for x in (key, value))
        else:
            k, v = (x.index_select(2, block.keys) for x in (key, value))
        mask = None if block.mask is None else block.mask[None, None]
        parts.append(sdpa_attention_forward(module, part, k, v, mask, **options)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
