"""Generation with the trained model itself, each distinct prompt token processed once.

Prompts of a call are packed as a prefix tree; keys and values of prefixes stay cached while the
adapter's version stands. Decoding is batched by length; finished rows leave the batch early.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nlac_lightning.backbone import Backbone
from nlac_lightning.generation.base import ADAPTERS, TOO_LONG, Completion, Request, with_room
from nlac_lightning.generation.radix import Node, RadixCache, gather
from nlac_lightning.generation.sampling import complete, draw, stop_reached, uniforms
from nlac_lightning.prefix_tree import PackedTree, pack_tree, split_packs


class _BufferLayer(CacheLayerMixin):
    """Keys and values of one layer in memory that was reserved beforehand."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.keys, self.values, self.length = keys, values, length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder(self, source: list[int]) -> None:
        """Keep ``len(source)`` rows, row i being what was in ``source[i]``; copies only those that
        move to another place."""
        moved = [(i, at) for i, at in enumerate(source) if i != at]
        if moved:
            to, at = (list(places) for places in zip(*moved, strict=True))
            self.keys[to], self.values[to] = self.keys[at], self.values[at]
        self.keys, self.values = self.keys[: len(source)], self.values[: len(source)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


@dataclass
class _Row:
    """A request whose prompt is processed: where its keys and values are, and what comes next."""

    index: int
    request: Request
    pack: int
    path: Tensor
    logits: Tensor


class InProcessGenerator:
    """Generator on a :class:`Backbone`.

    Args:
        backbone: the model.
        max_batch: rows decoded together.
        pack_tokens: distinct tokens prefilled in one forward pass.
        cache_tokens: tokens whose keys and values are kept per adapter.
    """

    def __init__(
        self,
        backbone: Backbone,
        max_batch: int = 64,
        pack_tokens: int = 1024,
        cache_tokens: int = 20_000,
    ) -> None:
        self.backbone = backbone
        self.max_batch, self.pack_tokens = max_batch, pack_tokens
        self._caches = {adapter: RadixCache(cache_tokens) for adapter in ADAPTERS}
        self._cached_versions = dict.fromkeys(ADAPTERS, -1)
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order.

        An answer ends where the model's positions do (``length``); a prompt that leaves it none is
        not computed (:data:`~nlac_lightning.generation.base.TOO_LONG`).
        """
        begin = time.perf_counter()
        positions = self.backbone.max_positions
        roomy = [with_room(request, positions) for request in requests]
        requests = [fitted or r for fitted, r in zip(roomy, requests, strict=True)]
        done: dict[int, Completion] = {}
        with self.backbone.reading():
            twin = _first_equals(requests)
            for adapter in ADAPTERS:
                chosen = [i for i in set(twin) if requests[i].adapter == adapter]
                version = self.backbone.versions[adapter]
                for i in [i for i in chosen if roomy[i] is None]:
                    chosen.remove(i)
                    done[i] = Completion((), "", (), TOO_LONG, version)
                    self.counts["too_long"] += 1
                if chosen:
                    with self.backbone.use(adapter):
                        self._generate(adapter, sorted(chosen), requests, done)
        self.seconds += time.perf_counter() - begin
        return [done[i] for i in twin]

    def _generate(
        self,
        adapter: str,
        chosen: list[int],
        requests: Sequence[Request],
        done: dict[int, Completion],
    ) -> None:
        cache, version = self._cache(adapter), self.backbone.versions[adapter]
        packs: list[list[_BufferLayer]] = []
        rows: list[_Row] = []
        for pack in split_packs([requests[i].ids for i in chosen], self.pack_tokens):
            indices = [chosen[p] for p in pack]
            tree, layers, logits = self._prefill(cache, [requests[i].ids for i in indices])
            for n, i in enumerate(indices):
                rows.append(_Row(i, requests[i], len(packs), tree.paths[n], logits[n]))
            packs.append(layers)
        rows.sort(key=lambda row: (row.request.sampling.max_new_tokens, len(row.path)))
        for start in range(0, len(rows), self.max_batch):
            self._decode(rows[start : start + self.max_batch], packs, cache, version, done)
        cache.trim()

    def read(
        self, adapter: str, sequences: Sequence[tuple[int, ...]], counts: Sequence[int]
    ) -> list[Tensor]:
        """Hidden states [counts[i], d] before the last ``counts[i]`` tokens of each sequence.

        What was prefilled or generated before them in this version of the adapter is not computed
        again, so texts that were just written are cheap to score.
        """
        states: dict[int, Tensor] = {}
        with self.backbone.reading(), self.backbone.use(adapter):
            cache = self._cache(adapter)
            for pack in split_packs(sequences, self.pack_tokens):
                prompts = [tuple(sequences[i][:-1]) for i in pack]
                known = [len(ids) - counts[i] for ids, i in zip(prompts, pack, strict=True)]
                tree, _, _, hidden = self._forward(cache, prompts, known)
                for n, i in enumerate(pack):
                    states[i] = hidden[tree.rows(n, known[n], len(prompts[n]))]
                self.counts["read_tokens"] += len(tree.input_ids)
            cache.trim()
        return [states[i] for i in range(len(sequences))]

    def forget(self) -> None:
        """Drop all cached keys and values, as a run that is resumed begins without them."""
        for cache in self._caches.values():
            cache.clear()

    def _cache(self, adapter: str) -> RadixCache:
        """What is known under the adapter's present version."""
        cache, version = self._caches[adapter], self.backbone.versions[adapter]
        if self._cached_versions[adapter] != version:
            cache.clear()
            self._cached_versions[adapter] = version
        return cache

    def _prefill(
        self, cache: RadixCache, prompts: list[tuple[int, ...]]
    ) -> tuple[PackedTree, list[_BufferLayer], Tensor]:
        limits = [len(ids) - 1 for ids in prompts]
        tree, cached, layers, hidden = self._forward(cache, prompts, limits)
        last = torch.stack([path[-1] - tree.cached for path in tree.paths])
        stacked = torch.stack([torch.cat([layer.keys, layer.values]) for layer in layers])
        for n in sorted(range(len(prompts)), key=lambda n: prompts[n]):
            new = tree.paths[n][cached[n] :].to(stacked.device)
            cache.insert(prompts[n], stacked[:, :, :, new])
        self.counts["prompt_tokens"] += sum(map(len, prompts))
        self.counts["prefilled_tokens"] += len(tree.input_ids)
        return tree, layers, self.backbone.logits(hidden[last]).float()

    def _forward(
        self, cache: RadixCache, prompts: list[tuple[int, ...]], limits: list[int]
    ) -> tuple[PackedTree, list[int], list[_BufferLayer], Tensor]:
        """Hidden states of one pack of prompts, of which at most ``limits`` tokens come from the
        cache; also how many of each did, and the keys and values of all."""
        nodes: dict[int, tuple[Node, int]] = {}
        matches = [cache.match(ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
        for node, length in (piece for match in matches for piece in match):
            nodes[id(node)] = (node, max(length, nodes.get(id(node), (node, 0))[1]))
        offsets: dict[int, int] = {}
        total = 0
        for key, (_, length) in nodes.items():
            offsets[key], total = total, total + length
        cached = [
            np.concatenate(
                [np.arange(length) + offsets[id(node)] for node, length in match]
                or [np.empty(0, np.int64)]
            )
            for match in matches
        ]
        tree = pack_tree(prompts, cached, total)
        layers = self._reserve(1, total + len(tree.input_ids))
        if nodes:
            known = gather(nodes)
            for number, layer in enumerate(layers):
                layer.keys[0, :, :total] = known[number, 0]
                layer.values[0, :, :total] = known[number, 1]
                layer.length = total
        hidden = self.backbone.forward_tree(tree, Cache(layers=list(layers)))
        return tree, [len(head) for head in cached], layers, hidden

    def _reserve(self, rows: int, tokens: int) -> list[_BufferLayer]:
        config = self.backbone.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (rows, heads, tokens, dim)
        dtype = self.backbone.compute_dtype
        return [
            _BufferLayer(
                torch.zeros(shape, dtype=dtype, device=self.backbone.device),
                torch.zeros(shape, dtype=dtype, device=self.backbone.device),
                0,
            )
            for _ in range(config.num_hidden_layers)
        ]

    def _decode(
        self,
        rows: list[_Row],
        packs: list[list[_BufferLayer]],
        cache: RadixCache,
        version: int,
        done: dict[int, Completion],
    ) -> None:
        limit = max(row.request.sampling.max_new_tokens for row in rows)
        longest = max(len(row.path) for row in rows)
        layers = self._reserve(len(rows), longest + limit)
        for number, layer in enumerate(layers):
            for b, row in enumerate(rows):
                source = packs[row.pack][number]
                path = row.path.to(source.keys.device)
                layer.keys[b, :, : len(path)] = source.keys[0, :, path]
                layer.values[b, :, : len(path)] = source.values[0, :, path]
            layer.length = longest
        lengths = torch.tensor([len(row.path) for row in rows])
        visible = torch.arange(longest + limit)[None] < lengths[:, None]
        visible[:, longest:] = True
        logits = torch.stack([row.logits for row in rows])
        noise = [uniforms(row.request) for row in rows]
        ids: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        active = list(range(len(rows)))  # row of each slot of the batch
        for step in range(limit):
            tokens, scores = draw(
                logits,
                [rows[b].request.sampling for b in active],
                [noise[b][step] for b in active],
            )
            self.counts["generated_tokens"] += len(active)
            keep = []
            for slot, b in enumerate(active):
                ids[b].append(tokens[slot])
                logprobs[b].append(scores[slot])
                request = rows[b].request
                stopped = stop_reached(self.backbone.tokenizer, ids[b], request)
                if stopped or step + 1 == request.sampling.max_new_tokens:
                    reason = "stop" if stopped else "length"
                    done[rows[b].index] = complete(
                        self.backbone.tokenizer, request, ids[b], logprobs[b], reason, version
                    )
                    if request.extend:
                        kv = [(x.keys[slot], x.values[slot]) for x in layers]
                        self._remember(cache, rows[b], ids[b][:-1], kv, longest)
                else:
                    keep.append(slot)
            if not keep:
                break
            if len(keep) < len(active):
                order = _close_ranks(keep)
                active = [active[slot] for slot in order]
                lengths, visible = lengths[order], visible[order]
                for layer in layers:
                    layer.reorder(order)
            last = torch.tensor([[ids[b][-1]] for b in active])
            end = longest + step + 1
            hidden = self.backbone.forward_step(
                last, (lengths + step)[:, None], visible[:, None, :end], Cache(layers=list(layers))
            )
            logits = self.backbone.logits(hidden[:, -1]).float()

    def _remember(
        self,
        cache: RadixCache,
        row: _Row,
        ids: list[int],
        kv: list[tuple[Tensor, Tensor]],
        start: int,
    ) -> None:
        """Keep what the next turn of this dialogue will start with."""
        if not ids:
            return
        end = start + len(ids)
        stacked = torch.stack([torch.stack([k[:, start:end], v[:, start:end]]) for k, v in kv])
        cache.insert(row.request.ids + tuple(ids), stacked)


def _close_ranks(keep: list[int]) -> list[int]:
    """An order of the kept slots in which as many as possible stay where they are."""
    source = list(range(len(keep)))
    stay = {slot for slot in keep if slot < len(keep)}
    movers = [slot for slot in keep if slot >= len(keep)]
    for hole in (slot for slot in source if slot not in stay):
        source[hole] = movers.pop()
    return source


def _first_equals(requests: Sequence[Request]) -> list[int]:
    """For each request the first one that must have the same answer, often itself.

    Greedy requests that are equal but for the seed are answered once; sampled ones that share the
    seed as well.
    """
    first: dict[Request, int] = {}
    greedy = [request.sampling.temperature == 0 for request in requests]
    keys = [replace(r, seed=0) if g else r for r, g in zip(requests, greedy, strict=True)]
    return [first.setdefault(key, i) for i, key in enumerate(keys)]
