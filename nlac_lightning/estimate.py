"""What an update of a config will cost, before any weight is loaded.

Memory follows from shapes; time from the tokens of one update and two speeds of this machine that
are measured on the spot: matrix products and memory reads. Expect the right order, and factors of
2 where a task's dialogues are much longer than their opening.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.backbone import BackboneConfig, with_adapter
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.generation.base import ADAPTERS
from nlac_lightning.models import load_errors, load_tokenizer, pick_dtype, resolve
from nlac_lightning.prefix_tree import common_prefix
from nlac_lightning.roles.roles import Roles

CHUNK = 1024
"""Positions whose logits exist at one time, see :mod:`nlac_lightning.losses`."""
LOGIT_COPIES = 5.2
"""Float32 tensors of chunk x vocabulary at the peak of the divergence, as measured there."""
NF4_BYTES = 0.5 + 1 / 64 + 1 / 4096
"""Bytes of a 4-bit weight with its doubly quantised scales (blocks of 64)."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of weights, without the adapters unless said.

    Attributes:
        weights: all of them.
        linear: those of the decoder's linear layers; a token costs 2 operations for each.
        head: of the language-model head.
        adapter: of one LoRA adapter.
        layers, width, inner: decoder layers, hidden and feed-forward size.
        cached: keys and values of one token, all layers.
    """

    weights: int
    linear: int
    head: int
    adapter: int
    layers: int
    width: int
    inner: int
    cached: int


def model_size(config: BackboneConfig) -> ModelSize:
    """Count the weights of a model without loading it."""
    source = resolve(config.name)
    with load_errors(config.name, source):
        shape = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
        head = model.get_output_embeddings().weight.numel()
        weights = sum(p.numel() for p in model.parameters())
        decoder = model.get_decoder()
        linear = sum(m.weight.numel() for m in decoder.modules() if isinstance(m, nn.Linear))
        peft = with_adapter(model, config)
    adapter = sum(p.numel() for name, p in peft.named_parameters() if "lora_" in name)
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    layers = shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    return ModelSize(
        weights, linear, head, adapter, layers, shape.hidden_size, inner, 2 * layers * heads * dim
    )


def dtype_of(config: BackboneConfig) -> torch.dtype:
    """The dtype that the base will have on this machine."""
    if config.dtype == "auto":
        return pick_dtype("cuda" if torch.cuda.is_available() else "cpu")[0]
    return getattr(torch, config.dtype)


def memory(module: NLAC, size: ModelSize, state_tokens: int) -> dict[str, float]:
    """Bytes of each part, at the peak of an update."""
    config, compute = module.backbone_config, module.compute_config
    item = dtype_of(config).itemsize
    per_token = item * (8 * size.width + 5 * size.inner + 2 * size.cached // size.layers)
    kept = item * size.width if config.gradient_checkpointing else per_token
    pack = compute.train_pack_tokens
    vocabulary = size.head // size.width
    quantised = size.linear if config.quantization == "nf4" else 0
    return {
        "base weights": quantised * NF4_BYTES + (size.weights - quantised) * item,
        "two adapters, gradients, optimizer": size.adapter * 4.0 * (2 + 1 + 2),
        "activations of a training pack": float(pack * (size.layers * kept + per_token)),
        "attention mask of a training pack": float(pack * pack * (1 + item)),
        "logits of a chunk": float(min(CHUNK, pack) * vocabulary * 4 * LOGIT_COPIES),
        "prefix caches": float(len(ADAPTERS) * compute.cache_tokens * size.cached * item),
        "keys and values while decoding": float(
            compute.decode_rows * state_tokens * size.cached * item
        ),
    }


@dataclass(frozen=True)
class UpdateTokens:
    """Tokens of one update in which every role writes as much as it may.

    Attributes:
        state: tokens of a task's opening, which stands for all states.
        shared: of these, the ones that all tasks begin with.
        prefilled: distinct prompt tokens of all roles.
        naive: prompt tokens of all roles, each counted as often as it is read.
        steps: decoding steps, one after the other.
        packed: distinct tokens of a forward pass of the losses.
        trained: tokens that carry a loss.
    """

    state: int
    shared: int
    prefilled: int
    naive: int
    steps: int
    packed: int
    trained: int


def update_tokens(module: NLAC, data: ReplayDataModule) -> UpdateTokens:
    """Count with the real tokenizer, environment and templates; no model is needed."""
    config = module.backbone_config
    tokenizer = load_tokenizer(config.name, trust_remote_code=config.trust_remote_code)
    roles = Roles(module.roles_config, tokenizer)
    data.env.meet(roles.codec.chat_template)
    openings = []
    for task in list(data.env.tasks("train"))[:2]:
        session = data.env.reset(task, 0)
        openings.append(list(session.opening))
        session.close()
    ids = [np.asarray(roles.codec.messages(opening)) for opening in openings]
    state, shared = tuple(ids[0].tolist()), common_prefix(ids[0], ids[-1])
    text = "so it will go on"
    fields: dict[str, dict[str, Any]] = {
        "policy": {},
        "successor": {"action": text},
        "backup": {
            "action": text, "reward": 0.0, "replies": text, "terminal": False,
            "next_action": text, "next_description": text,
        },
        "evaluator": {"action": text, "descriptions": [text]},
        "refinement": {"action": text, "critique": text},
    }  # fmt: skip
    batch = data._batch_size
    limits = {role: roles.settings(role).sampling.max_new_tokens for role in fields}
    own, naive = {}, 0
    for role, values in fields.items():
        prompt = len(roles.prompt(role, state, openings[0], **values).ids)
        alone = roles.settings(role).context == "none"
        own[role] = prompt if alone else prompt - len(state)
        naive += batch * prompt
    # policy and successor are also asked in the next state, which is a turn longer
    turn = limits["policy"] + own["policy"]
    again = ("policy", "successor")
    naive += batch * sum(len(state) + turn + own[role] for role in again)
    prefilled = shared + batch * (
        len(state) - shared + turn + sum(own.values()) + sum(own[role] for role in again)
    )
    trained = batch * (limits["backup"] + limits["refinement"])
    packed = shared + trained + batch * (len(state) - shared + own["successor"] + own["policy"])
    steps = sum(limits.values()) + sum(limits[role] for role in again)
    return UpdateTokens(len(state), shared, prefilled, naive, steps, packed, trained)


@dataclass(frozen=True)
class Speed:
    """What this machine does: operations a second in matrix products, bytes read a second."""

    operations: float
    read: float


def measure_speed(dtype: torch.dtype) -> Speed:
    """Best of a few short measurements on the device that will train; about a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    big = torch.ones(2**26, device=device)
    products = min(_seconds(lambda: a @ b, device) for _ in range(5))
    reads = min(_seconds(big.sum, device) for _ in range(5))
    return Speed(2 * n**3 / products, big.nbytes / reads)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


REACHED = 0.5
"""Share of the measured speeds that whole models reach (``benchmarks/speed.py``, row e)."""


def seconds(
    module: NLAC, size: ModelSize, tokens: UpdateTokens, batch: int, speed: Speed
) -> dict[str, float]:
    """Seconds of each part of an update."""
    config = module.backbone_config
    operations, read = REACHED * speed.operations, REACHED * speed.read
    item = NF4_BYTES if config.quantization == "nf4" else dtype_of(config).itemsize
    weights = (size.linear + size.head) * item
    keys = batch * tokens.state * size.cached * dtype_of(config).itemsize
    step = max((weights + keys) / read, 2 * (size.linear + size.head) * batch / operations)
    attention = 4 * size.width * size.layers * tokens.state
    passes = 4 if config.gradient_checkpointing else 3
    return {
        "prefill": tokens.prefilled * (2 * size.linear + attention / 2) / operations,
        "decoding": tokens.steps * step,
        "losses": (
            tokens.packed * passes * (2 * size.linear + attention / 2)
            + tokens.trained * 8 * size.head
        )
        / operations,
    }
