"""Strategies that spread the frozen base over the processes, and leave the adapters whole.

Adapters are small: with whole ones, optimizer, moving average, clipping and checkpoints are those
of an unsharded run, and a checkpoint fits any number of processes. Only the base's decoder layers,
which are most of the memory, are sharded; embedding and head stay whole as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

from nlac_lightning.distributed import world_size
from nlac_lightning.errors import ConfigError


class Shards(Protocol):
    """The decoder layers of a base that is spread over the processes."""

    def hold(self) -> None:
        """Gather all layers and keep them, until :meth:`release`; forward passes then exchange
        nothing. All processes call it together."""

    def release(self) -> None:
        """Keep this process's part only."""


class WholeAdapters(Strategy):
    """What a strategy with a sharded base saves and loads is not sharded: the plain ways are right.

    Subclasses say how the base is sharded.
    """

    def shard(self, decoder: nn.Module, kept: set[nn.Parameter]) -> Shards:
        """Shard the decoder's layers, but for the parameters that are ``kept`` whole."""
        raise NotImplementedError

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The adapters; nothing has to be gathered."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    optimizer_state = Strategy.optimizer_state
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict


class ShardedBaseStrategy(WholeAdapters, ModelParallelStrategy):
    """FSDP2 (``fully_shard``) on GPUs or, with gloo, on CPU processes.

    Arguments as in ``ModelParallelStrategy``; ``tensor_parallel_size`` has to be 1.
    """

    def shard(self, decoder: nn.Module, kept: set[nn.Parameter]) -> Shards:
        return _Shards2(decoder, kept, self.device_mesh["data_parallel"])


class FSDPBaseStrategy(WholeAdapters, FSDPStrategy):
    """The older FSDP (``FullyShardedDataParallel``), for torch setups that are tuned for it.

    Arguments as in ``FSDPStrategy``; wrapping policies and ``state_dict_type`` have no part.
    """

    def shard(self, decoder: nn.Module, kept: set[nn.Parameter]) -> Shards:
        options = self.kwargs | {
            "sharding_strategy": self.sharding_strategy,
            "cpu_offload": self.cpu_offload,
            "device_id": self.root_device,
        }
        return _Shards1(decoder, kept, options)

    @property
    def precision_plugin(self) -> FSDPPrecision:
        """Leaves the model in its own dtypes: base as configured, adapters in float32."""
        return _AsLoaded("32-true")

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        """The trainer's choice has no part."""


class _AsLoaded(FSDPPrecision):
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data  # a batch holds no tensors


class _Shards2:
    def __init__(self, decoder: nn.Module, kept: set[nn.Parameter], mesh: DeviceMesh) -> None:
        self._layers: list[FSDPModule] = []
        for layer in decoder.layers:  # type: ignore[union-attr]
            _make_contiguous(layer)
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
            self._layers.append(layer)
        sharded = {p for layer in decoder.layers for p in layer.parameters()} - kept  # type: ignore[union-attr]
        # a root that owns nothing: it lets the gathering of a layer overlap another's work
        fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - sharded)

    def hold(self) -> None:
        for layer in self._layers:
            layer.set_reshard_after_forward(False)
            layer.unshard()

    def release(self) -> None:
        for layer in self._layers:
            layer.reshard()
            layer.set_reshard_after_forward(True)


class _Shards1:
    def __init__(
        self, decoder: nn.Module, kept: set[nn.Parameter], options: dict[str, Any]
    ) -> None:
        self._decoder = decoder
        self._bare: Sequence[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
        self._layers = []
        for layer in self._bare:
            _make_contiguous(layer)
            own = [p for p in layer.parameters() if p in kept]
            self._layers.append(FullyShardedDataParallel(layer, ignored_states=own, **options))
        decoder.layers = nn.ModuleList(self._layers)
        self._held = ExitStack()

    def hold(self) -> None:
        for layer in self._layers:
            self._held.enter_context(
                FullyShardedDataParallel.summon_full_params(layer, recurse=False, writeback=False)
            )
        # FSDP's own forward would let go of each layer again
        self._decoder.layers = nn.ModuleList(self._bare)

    def release(self) -> None:
        self._decoder.layers = nn.ModuleList(self._layers)
        self._held.close()


def _make_contiguous(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers that FSDP puts around layers."""
    return name.replace("_fsdp_wrapped_module.", "")


@contextmanager
def held(shards: Shards) -> Iterator[None]:
    """Hold the whole base inside."""
    shards.hold()
    try:
        yield
    finally:
        shards.release()


def check_strategy(strategy: Strategy, on_policy: bool = False) -> None:
    """Raise ConfigError for a strategy that would not train the adapters as it should."""
    if on_policy and world_size() > 1:
        raise ConfigError(
            "trainer.devices",
            "an on-policy algorithm trains on whole rollouts, which are not split over processes",
            "set it to 1, or use an off-policy algorithm (nlac, rft, nlrl, self_distillation)",
        )
    if isinstance(strategy, WholeAdapters):
        if (
            isinstance(strategy, ModelParallelStrategy)
            and strategy.device_mesh["tensor_parallel"].size() != 1
        ):
            raise ConfigError(
                "trainer.strategy.tensor_parallel_size", "tensors are not split", "set it to 1"
            )
    elif isinstance(strategy, ModelParallelStrategy | FSDPStrategy):
        raise ConfigError(
            "trainer.strategy",
            f"{type(strategy).__name__} would shard and save adapters and base alike",
            "use nlac_lightning.sharding.ShardedBaseStrategy (configs/strategy/fsdp2.yaml) or "
            "nlac_lightning.sharding.FSDPBaseStrategy (configs/strategy/fsdp.yaml)",
        )
    elif world_size() > 1 and not isinstance(strategy, DDPStrategy):
        raise ConfigError(
            "trainer.strategy",
            f"{type(strategy).__name__} is not supported with several processes",
            "use configs/strategy/ddp.yaml, fsdp.yaml or fsdp2.yaml",
        )


def own_gradient_exchange(strategy: Strategy) -> None:
    """Turn off DDP's exchange per backward pass: ``add_gradients`` takes its place.

    Processes do not have equal numbers of backward passes, which DDP requires.
    """
    model = strategy.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = False
