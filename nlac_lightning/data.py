"""The data module: batches of transitions from the replay buffer, and tasks to evaluate on."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning
from torch.utils.data import DataLoader, Dataset

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.distributed import gather, rank, world_size
from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.replay.buffer import Key, ReplayBuffer
from nlac_lightning.replay.episode import FAILURES, Transition
from nlac_lightning.replay.mixed_sampler import MixedSampler
from nlac_lightning.replay.sampler import (
    BatchSampler,
    Strategy,
    TransitionSampler,
    check_sampling,
)

T = TypeVar("T")


class ReplayDataModule(lightning.LightningDataModule):
    """Owns the replay buffer and streams batches from it.

    Training batches are ``list[Transition]``, evaluation batches ``list[Task]``. A batch depends
    on the seed, on :attr:`position` and on what the buffer holds when the batch is asked for, with
    any number of workers, so a resumed run gets the batches of one that was not stopped.

    Args:
        env: where tasks come from; its name marks the buffer.
        buffer: the buffer's file; None means ``replay.sqlite`` in the trainer's
            ``default_root_dir``. An existing file is continued.
        capacity: transitions to keep; beyond it the oldest episodes go.
        batch_size: transitions per training batch.
        strategy, recency_half_life, transitions_per_episode, contrast_batches, seed: see
            :class:`~nlac_lightning.replay.sampler.TransitionSampler`.
        success_share: share of a batch, in [0, 1], that comes from successful episodes, whose
            actions so are tried again and whose rewards reach the critic, however rare they are.
            It changes how often each transition is seen, not what followed it, so bootstrapped
            targets stay right where an action's outcome has no chance in it. 0 is the paper's.
        success_after: so many first batches are without that share.
        batches_per_epoch: the stream never ends, an epoch does; None means one epoch of
            ``trainer.max_steps`` batches.
        val_tasks, test_tasks: number of tasks of the split to evaluate on; None means all.
        eval_batch_size: tasks per evaluation batch, that is, episodes played side by side.
        num_workers: processes that read transitions ahead; 0 reads them in the main process.
        buffer_per_process: with several processes, each keeps a buffer of its own (the file's name
            gets its number), for machines that share no disk; otherwise all share one file on one
            machine.
        exclude_reasons: episodes that ended so stay in the buffer but are never trained on; by
            default those that ended because environment, user or engine failed.

    Raises:
        ConfigError: a size that is not positive, or an unknown strategy.
    """

    def __init__(
        self,
        env: TextEnv,
        buffer: str | None = None,
        capacity: int = 100_000,
        batch_size: int = 16,
        strategy: Strategy = "uniform",
        recency_half_life: float = 1000.0,
        transitions_per_episode: int = 1,
        contrast_batches: int = 0,
        success_share: float = 0.0,
        success_after: int = 0,
        batches_per_epoch: int | None = None,
        val_tasks: int | None = None,
        test_tasks: int | None = None,
        eval_batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        exclude_reasons: Sequence[str] = FAILURES,
        buffer_per_process: bool = False,
    ) -> None:
        super().__init__()
        require_positive("data.capacity", capacity)
        check_sampling(
            batch_size, strategy, recency_half_life, transitions_per_episode, contrast_batches, seed
        )
        require_positive("data.success_share", success_share, zero=True)
        require_positive("data.success_share", 1 - success_share, zero=True)
        require_positive("data.success_after", success_after, zero=True)
        require_positive("data.eval_batch_size", eval_batch_size)
        require_positive("data.num_workers", num_workers, zero=True)
        for name, size in (
            ("batches_per_epoch", batches_per_epoch),
            ("val_tasks", val_tasks),
            ("test_tasks", test_tasks),
        ):
            if size is not None:
                require_positive(f"data.{name}", size)
        self.env = env
        self.capacity, self.buffer_per_process = capacity, buffer_per_process
        self.position = 0
        """Batches handed to the trainer so far; the next one is drawn for this number."""
        self._path = buffer
        self._buffer: ReplayBuffer | None = None
        self._batch_size, self._seed = batch_size, seed
        self._success = success_share, success_after
        self._make_sampler = partial(
            TransitionSampler,
            batch_size=batch_size,
            strategy=strategy,
            recency_half_life=recency_half_life,
            transitions_per_episode=transitions_per_episode,
            contrast_batches=contrast_batches,
            seed=seed,
            exclude=exclude_reasons,
        )
        self._batches_per_epoch = batches_per_epoch
        self._num_tasks = {"val": val_tasks, "test": test_tasks}
        self._eval_batch_size = eval_batch_size
        self._num_workers = num_workers

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer, opened on first use."""
        return self._buffer if self._buffer is not None else self.open_buffer()

    def open_buffer(self, codec: str | None = None) -> ReplayBuffer:
        """Open the buffer and check whose episodes it holds.

        Args:
            codec: fingerprint of tokenizer and prompt format; None leaves it unchecked.

        Raises:
            ConfigError: the file belongs to another codec or environment, or cannot be opened.
        """
        if self._buffer is not None:
            self._buffer.close()
        path = self.buffer_path(self.trainer.default_root_dir if self.trainer else ".")
        self._buffer = ReplayBuffer(path, self.capacity, codec=codec, env=self.env.name)
        return self._buffer

    def buffer_path(self, root: str | Path) -> Path:
        """The buffer's file, for a trainer whose ``default_root_dir`` is ``root``."""
        path = Path(self._path) if self._path is not None else Path(root, "replay.sqlite")
        return path.with_stem(f"{path.stem}.{rank()}") if self.buffer_per_process else path

    def marks(self) -> list[int]:
        """How many episodes each of the run's buffers has ever held."""
        return self._of_each_buffer(self.buffer.high_water_mark)

    def turns(self) -> list[int]:
        """How many turns each of the run's buffers holds."""
        return self._of_each_buffer(len(self.buffer))

    def _of_each_buffer(self, own: int) -> list[int]:
        return gather(own) if self.buffer_per_process else [own]

    def own_mark(self, marks: Sequence[int]) -> int:
        """This process's of a checkpoint's :meth:`marks`.

        Raises:
            ConfigError: the checkpoint's run had another number of buffers.
        """
        here = world_size() if self.buffer_per_process else 1
        if len(marks) != here:
            raise ConfigError(
                "data.buffer_per_process",
                f"the checkpoint's run had {len(marks)} buffers, this one has {here}",
                "continue with as many processes and the same setting",
            )
        return marks[rank() if self.buffer_per_process else 0]

    @property
    def prepares_buffer(self) -> bool:
        """Whether this process brings its buffer to the state of a checkpoint."""
        return self.buffer_per_process or rank() == 0

    def setup(self, stage: str) -> None:
        """Open the buffer before training, so that a wrong file fails at once."""
        if stage == "fit":
            self.open_buffer()

    def teardown(self, stage: str) -> None:
        """Let go of the buffer's file; it opens again when used."""
        if self._buffer is not None:
            self._buffer.close()

    def train_dataloader(self) -> Iterable[list[Transition]]:
        """An endless stream of batches, cut into epochs."""
        sampler = self._own_sampler() or self._sampler()
        return _Stream(lambda: self._batches(sampler), self._epoch_length())

    def _sampler(self) -> BatchSampler:
        """What :attr:`_make_sampler` draws, with the share of successes that is configured."""
        rest: BatchSampler = self._make_sampler(self.buffer)
        share, after = self._success
        if not share:
            return rest
        return MixedSampler(self.buffer, rest, self._batch_size, share, after, self._seed)

    def _own_sampler(self) -> BatchSampler | None:
        """What the algorithm trains on, where it does not leave that to this module."""
        module = self.trainer.lightning_module if self.trainer else None
        if not isinstance(module, Algorithm):
            return None
        return module.make_sampler(self.buffer, self._batch_size, self._seed)

    def val_dataloader(self) -> DataLoader[Task]:
        """Batches of validation tasks."""
        return self._task_loader("val")

    def test_dataloader(self) -> DataLoader[Task]:
        """Batches of test tasks."""
        return self._task_loader("test")

    def predict_dataloader(self) -> DataLoader[Task]:
        """Batches of test tasks."""
        return self._task_loader("test")

    def transfer_batch_to_device(self, batch: T, device: Any, dataloader_idx: int) -> T:
        """Leave the batch as it is: the algorithm makes the tensors."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, for the checkpoint."""
        world = self.trainer.world_size if self.trainer else 1
        return {"position": self.position, "world_size": world}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the checkpoint's position."""
        world = self.trainer.world_size if self.trainer else 1
        drawn = state_dict["position"] * state_dict.get("world_size", 1)
        self.position = -(-drawn // world)  # the batches of all processes are behind us

    def _epoch_length(self) -> int:
        if self._batches_per_epoch is not None:
            return self._batches_per_epoch
        if not self.trainer:
            return sys.maxsize
        if self.trainer.max_steps > 0:
            return self.trainer.max_steps
        raise ConfigError(
            "data.batches_per_epoch",
            "an endless stream of batches needs an end",
            "set trainer.max_steps, or how many batches make an epoch",
        )

    def _batches(self, sampler: BatchSampler) -> Iterator[list[Transition]]:
        """Batches from :attr:`position` on.

        Workers read ahead by guessing that the buffer stays as it is. Where it did not, the guess
        differs from what is drawn now, and the batch is read here instead.
        """
        ahead = self._read_ahead(sampler) if self._num_workers else itertools.repeat(None)
        for batch in ahead:
            keys = sampler.draw(self._shard(self.position))
            if batch is None or [(x.episode_id, x.t) for x in batch] != keys:
                batch = sampler.buffer.transitions(keys)
            self.position += 1
            yield batch

    def _read_ahead(self, sampler: BatchSampler) -> Iterator[list[Transition] | None]:
        guesses = (sampler.draw(self._shard(p)) for p in itertools.count(self.position))
        return iter(
            DataLoader(
                _Reader(sampler.buffer),
                batch_sampler=guesses,
                num_workers=self._num_workers,
                collate_fn=_as_it_is,
            )
        )

    def _shard(self, position: int) -> int:
        """Number of this rank's batch, so that ranks draw different ones."""
        if not self.trainer:
            return position
        return position * self.trainer.world_size + self.trainer.global_rank

    def _task_loader(self, split: str) -> DataLoader[Task]:
        tasks, number = self.env.tasks(split), self._num_tasks[split]
        if number is not None and number > len(tasks):
            raise ConfigError(
                f"data.{split}_tasks",
                f"{number} tasks asked for, but {self.env.name} has {len(tasks)}",
                f"set it to {len(tasks)} or less",
            )
        chosen = list(itertools.islice(tasks, number))
        return DataLoader(
            chosen,  # type: ignore[arg-type]  # a list is a map-style dataset
            batch_size=self._eval_batch_size,
            collate_fn=_as_it_is,
        )


class _Stream(Iterable[T]):
    """Batches with an epoch's length, without which Lightning would ask for one batch too early."""

    def __init__(self, start: Callable[[], Iterator[T]], length: int) -> None:
        self._start, self._length = start, length

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self._start(), self._length)

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the position. That this exists marks it resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""


class _Reader(Dataset[Transition]):
    """Reads a batch by its keys, in a worker."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __getitems__(self, keys: list[Key]) -> list[Transition] | None:
        try:
            return self._buffer.transitions(keys)
        except KeyError:  # evicted since the guess
            return None


def _as_it_is(batch: T) -> T:
    return batch
