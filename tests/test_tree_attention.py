"""Attention block by block equals the dense mask, in values and gradients, and costs less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from nlac_lightning.algorithms.examples import Example, Teacher, accumulate
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.prefix_tree import pack_tree

SYSTEM = tuple(range(100, 148))
STATES = [SYSTEM + tuple(range(200 + 10 * n, 216 + 10 * n)) for n in range(4)]
SEQUENCES = [(*s, 300 + role, 310 + role, 320) for s in STATES for role in range(3)] + STATES[:1]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checkpointed"])
def backbone(request: pytest.FixtureRequest, tiny_llama_path: str) -> Backbone:
    config = BackboneConfig(
        tiny_llama_path, lora_r=4, dtype="float32", gradient_checkpointing=request.param
    )
    backbone = Backbone(config)
    generator = torch.Generator().manual_seed(0)
    for adapter in ("online", "target"):
        for parameter in backbone.adapter_parameters(adapter).values():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return backbone.train()


def gradient(backbone: Backbone) -> Tensor:
    grads = [p.grad for p in backbone.adapter_parameters("online").values()]
    flat = torch.cat([g.flatten() for g in grads if g is not None])
    backbone.zero_grad()
    return flat


def test_blocks_replace_the_dense_mask_where_they_save_work() -> None:
    tree = pack_tree(SEQUENCES)
    assert sum(b.end - b.start for b in tree.blocks) == len(tree.input_ids)
    for block in tree.blocks:
        keys = range(block.start, block.end) if block.keys is None else block.keys.tolist()
        seen = torch.ones(len(keys), len(keys)).tril().bool() if block.mask is None else block.mask
        dense = torch.zeros(block.end - block.start, len(tree.input_ids), dtype=torch.bool)
        dense[:, list(keys)] = seen
        assert torch.equal(dense, tree.mask[block.start : block.end])
    assert not pack_tree([SYSTEM]).blocks, "one sequence is plain causal attention"


@pytest.fixture
def exact(backbone: Backbone) -> Iterator[Backbone]:
    """In float64: rounding, which differs from one processor to the next, hides no fault."""
    yield backbone.double()
    backbone.float()


def test_states_equal_those_of_each_sequence_alone(exact: Backbone) -> None:
    tree = pack_tree(SEQUENCES)
    with torch.no_grad(), exact.use("online"):
        hidden = exact.forward_tree(tree)
        for n, ids in enumerate(SEQUENCES):
            alone = exact._decoder(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(hidden[tree.rows(n, 0, len(ids))], alone)


def test_states_after_a_cached_prefix(exact: Backbone) -> None:
    backbone = exact
    known = torch.arange(len(SYSTEM)).numpy()
    cache = DynamicCache()
    with torch.no_grad(), backbone.use("target"):
        backbone.eval().forward_tree(pack_tree([SYSTEM]), cache)
        tree = pack_tree(SEQUENCES, [known] * len(SEQUENCES), len(SYSTEM))
        assert tree.blocks
        hidden = backbone.forward_tree(tree, cache)
        whole = pack_tree(SEQUENCES)
        again = backbone.forward_tree(whole)
        backbone.train()
    for n, ids in enumerate(SEQUENCES):
        rows = tree.rows(n, len(SYSTEM), len(ids)), whole.rows(n, len(SYSTEM), len(ids))
        torch.testing.assert_close(hidden[rows[0]], again[rows[1]])


def test_loss_and_gradient_equal_the_unpacked_ones(backbone: Backbone) -> None:
    """L1 with its teacher and L2 over shared prefixes, 1e-5 relative in float32."""
    examples = [
        Example("critic", ids, len(ids) - 2, teacher=Teacher("target", ids[3:]), weight=0.3)
        for ids in SEQUENCES[:6]
    ] + [Example("policy", ids, len(ids) - 3, weight=0.7) for ids in SEQUENCES[6:12]]
    packed = accumulate(backbone, examples, 10_000, torch.Tensor.backward)
    ours = gradient(backbone)
    assert packed["packed_tokens"] < 0.3 * packed["example_tokens"]
    sums = {"critic": 0.0, "policy": 0.0}
    for example in examples:
        length = len(example.ids) - example.start
        with backbone.use("online"):
            logits = backbone.model(torch.tensor([example.ids])).logits[0, -length - 1 : -1]
            if example.teacher is None:
                loss = F.cross_entropy(logits, torch.tensor(example.ids[-length:]))
            else:
                with torch.no_grad(), backbone.use("target"):
                    backbone.eval()
                    teacher = backbone.model(torch.tensor([example.teacher.ids])).logits[0]
                    backbone.train()
                p = teacher[-length - 1 : -1].log_softmax(-1)
                loss = F.kl_div(logits.log_softmax(-1), p, log_target=True, reduction="none")
                loss = loss.sum(-1).mean()
            (example.weight * loss).backward()
        sums[example.name] += float(loss.detach()) / 6
    theirs = gradient(backbone)
    for name, value in sums.items():
        assert packed[name] == pytest.approx(value, rel=1e-5)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
