"""Training with several processes: what they agree on.

Each process draws its own batch and works through it alone; what is trained (the online adapter,
below a hundredth of the weights) is the same everywhere. So one exchange a step is enough: the
sum of the adapter's gradients. Nothing depends on how many packs, texts or turns a process has,
so unequal lengths cannot hang a run. With one process every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nlac_lightning.errors import StoppedRun

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


def agree(failure: Exception | None) -> None:
    """Raise in every process if one of them has failed, so that none waits for it.

    Raises:
        StoppedRun: another process failed; here nothing did. ``failure`` itself where there is one.
    """
    reasons = gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise StoppedRun(f"process {process} stopped. {reason}")


def totals(*numbers: float) -> tuple[float, ...]:
    """Each number's sum over all processes: the denominators of means over the whole batch."""
    return tuple(map(sum, zip(*gather(numbers), strict=True)))


def sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sum by name."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0) + value
    return found


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
