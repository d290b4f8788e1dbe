"""Training with several processes: what they agree on, and how the base is sharded.

Each process draws its own batch and works through it alone; what is trained (the online adapter,
below a hundredth of the weights) is the same everywhere. So one exchange a step is enough: the
sum of the adapter's gradients. Nothing depends on how many packs, texts or turns a process has,
so unequal lengths cannot hang a run. With one process every function here does nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from nlac_lightning.errors import ConfigError

T = TypeVar("T")


def world_size() -> int:
    """Number of processes; 1 outside of distributed runs."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


def gather(value: T) -> list[T]:
    """Every process's value, by rank, on every process."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def totals(*numbers: int) -> tuple[int, ...]:
    """Each number's sum over all processes: the denominators of means over the whole batch."""
    return tuple(map(sum, zip(*gather(numbers), strict=True)))


def sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sum by name."""
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            found[name] += value
    return dict(found)


def means(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean by name, over the parts that have the name."""
    counts = sums(dict.fromkeys(part, 1.0) for part in parts)
    return {name: value / counts[name] for name, value in sums(parts).items()}


def add_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Replace each gradient by its sum over all processes, in one exchange.

    A sum, since each example's weight is already its share of the batch of all processes: a mean
    of the processes' means would weigh an example by how many its process happens to have.
    A process without a gradient (nothing to learn from its batch) counts as zero.

    Returns:
        Whether any process has a gradient.
    """
    trained = list(parameters)
    if not any(gather(any(p.grad is not None for p in trained))):
        return False
    if world_size() == 1:
        return True
    flat = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in trained]
    )
    dist.all_reduce(flat)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter)
    return True


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Set the tensors to those of process 0, in place."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


class ShardedBaseStrategy(ModelParallelStrategy):
    """FSDP2: the decoder layers of the frozen base are spread over the processes.

    The adapters stay whole on each process: they are small, and so optimizer, moving average,
    clipping and checkpoints are those of an unsharded run, and a checkpoint fits any number of
    processes. Arguments as in ``ModelParallelStrategy``; ``tensor_parallel_size`` has to be 1.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The adapters; nothing has to be gathered."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    # What is saved and loaded is not sharded, so the plain strategy's ways are right.
    optimizer_state = Strategy.optimizer_state
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict


def check_strategy(strategy: Strategy, on_policy: bool = False) -> None:
    """Raise ConfigError for a strategy that would not train the adapters as it should."""
    if on_policy and world_size() > 1:
        raise ConfigError(
            "trainer.devices",
            "an on-policy algorithm trains on whole rollouts, which are not split over processes",
            "set it to 1, or use an off-policy algorithm (nlac, rft, nlrl, self_distillation)",
        )
    if isinstance(strategy, ModelParallelStrategy):
        if not isinstance(strategy, ShardedBaseStrategy):
            raise ConfigError(
                "trainer.strategy",
                "ModelParallelStrategy would shard and save the frozen base",
                "use nlac_lightning.distributed.ShardedBaseStrategy (configs/strategy/fsdp2.yaml)",
            )
        mesh = strategy.device_mesh
        if mesh["tensor_parallel"].size() != 1:
            raise ConfigError(
                "trainer.strategy.tensor_parallel_size", "tensors are not split", "set it to 1"
            )
    elif world_size() > 1 and not isinstance(strategy, DDPStrategy):
        raise ConfigError(
            "trainer.strategy",
            f"{type(strategy).__name__} is not supported with several processes",
            "use configs/strategy/ddp.yaml or configs/strategy/fsdp2.yaml",
        )


def own_gradient_exchange(strategy: Strategy) -> None:
    """Turn off DDP's exchange per backward pass: :func:`add_gradients` takes its place.

    Processes do not have equal numbers of backward passes, which DDP requires.
    """
    model = strategy.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = False
