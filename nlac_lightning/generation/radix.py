"""A cache of keys and values by token prefix, bounded in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Node:
    """A run of tokens that follows its parent's; ``kv`` is [layers, 2, heads, tokens, dim]."""

    ids: tuple[int, ...]
    kv: Tensor | None
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    used: int = 0


class RadixCache:
    """Longest-prefix store of keys and values for one adapter version.

    Args:
        max_tokens: tokens held at most; the least recently used ends of branches go first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.root = Node((), None, None)
        self.tokens = 0
        self._clock = 0

    def match(self, ids: Sequence[int], limit: int | None = None) -> list[tuple[Node, int]]:
        """Nodes that spell the longest known prefix of ``ids``, and how much of each is used."""
        self._clock += 1
        end = len(ids) if limit is None else limit
        found: list[tuple[Node, int]] = []
        node, at = self.root, 0
        while at < end:
            child = node.children.get(ids[at])
            if child is None:
                break
            length = _shared(child.ids, ids, at, end)
            child.used = self._clock
            found.append((child, length))
            at += length
            if length < len(child.ids):
                break
            node = child
        return found

    def insert(self, ids: Sequence[int], kv: Tensor) -> None:
        """Remember a sequence; ``kv`` holds its last ``kv.shape[3]`` tokens, the rest is known."""
        found = self.match(ids)
        known = sum(length for _, length in found)
        if known == len(ids):
            return
        node = self.root
        if found:
            node, length = found[-1]
            if length < len(node.ids):
                self._split(node, length)
        skip = known - (len(ids) - kv.shape[3])
        if skip < 0:
            return  # the beginning was evicted meanwhile, so there is nothing to hang this on
        new = Node(tuple(ids[known:]), kv[:, :, :, skip:].clone(), node, used=self._clock)
        node.children[new.ids[0]] = new
        self.tokens += len(new.ids)

    def _split(self, node: Node, at: int) -> None:
        assert node.kv is not None
        tail = Node(node.ids[at:], node.kv[:, :, :, at:].clone(), node, node.children, node.used)
        for child in tail.children.values():
            child.parent = tail
        node.ids, node.kv = node.ids[:at], node.kv[:, :, :, :at].clone()
        node.children = {tail.ids[0]: tail}

    def trim(self) -> None:
        """Drop the least recently used leaves until the bound holds."""
        if self.tokens <= self.max_tokens:
            return
        leaves = sorted((n for n in self._nodes() if not n.children), key=lambda n: -n.used)
        while self.tokens > self.max_tokens and leaves:
            leaf = leaves.pop()
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.ids[0]]
            self.tokens -= len(leaf.ids)
            if not parent.children and parent is not self.root:
                leaves.append(parent)
                leaves.sort(key=lambda n: -n.used)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _shared(run: tuple[int, ...], ids: Sequence[int], at: int, end: int) -> int:
    n = min(len(run), end - at)
    if tuple(ids[at : at + n]) == run[:n]:
        return n
    return next(i for i in range(n) if run[i] != ids[at + i])


def gather(nodes: dict[int, tuple[Node, int]]) -> Tensor:
    """Keys and values of the used part of each node, one after the other."""
    parts = [node.kv[:, :, :, :length] for node, length in nodes.values() if node.kv is not None]
    return torch.cat(parts, dim=3)
