"""A checkpoint when a run is told to stop."""

from __future__ import annotations

import copy
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning

from nlac_lightning import interrupts
from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import gather
from nlac_lightning.errors import StoppedRun

log = logging.getLogger(__name__)

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
"""Ctrl-C; what schedulers send before they kill; what SLURM is usually asked to send earlier."""


class InterruptCheckpoint(lightning.Callback):
    """Writes ``last.ckpt`` when a run is told to stop, so that ``--ckpt_path last`` continues.

    Another one at the start makes a run that is killed in its first rollouts continue with them.
    It stops where it stands: a half-made batch is made again, collected episodes of an unfinished
    collection are played again as they were, and the continued run equals one that was never
    stopped. The first collection alone keeps its episodes, which were paid for; where several are
    played at once, those that a stop cut off join the buffer in another order than without it. A
    second Ctrl-C stops at once; the file before is then still whole. A run that stops for a reason
    of its own (:class:`~nlac_lightning.errors.StoppedRun`) is saved in the same way.

    Several processes agree before their next step instead, since all must write together; where one
    of them stops for a reason of its own, the checkpoint before it is what a run continues from.

    SLURM's own requeueing, where Lightning has set it up, follows the checkpoint.
    """

    def __init__(self) -> None:
        self._trainer: lightning.Trainer | None = None
        self._asked: int | None = None
        self._at_once = False
        self._before: dict[int, Any] = {}
        self._alone = True
        self._together = False
        self._step = -1
        self._drawn_before = 0
        self._progress: dict[str, Any] = {}

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Go first, since the rollouts before training should be interruptible too."""
        callbacks: list[lightning.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._trainer = trainer
        self._asked, self._at_once = None, False
        self._alone, self._together = trainer.world_size == 1, False
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ReplayDataModule):  # more than steps after more processes than now
            self._drawn_before = data.position - trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if trainer.ckpt_path is None and not trainer.global_step:
            trainer.save_checkpoint(self._path(trainer), weights_only=False)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if any(gather(self._asked)):  # all processes stop before the same step
            self._together = True
            raise KeyboardInterrupt
        if isinstance(pl_module, Algorithm):
            self._step, self._progress = trainer.global_step, copy.deepcopy(pl_module.progress())

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._trainer = None
        if self._alone and self._asked is not None:
            raise KeyboardInterrupt

    def teardown(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        self._restore()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        told = isinstance(exception, KeyboardInterrupt)
        saves = self._together or (self._alone and (told or isinstance(exception, StoppedRun)))
        if saves and trainer.optimizers and not self._at_once:
            for number in self._before:
                self._handle(number, signal.SIG_IGN)
            # Lightning ignores Ctrl-C from here on; a second one should still end this
            self._handle(signal.SIGINT, signal.default_int_handler)
            try:
                self._save(trainer, pl_module)
            except StoppedRun as error:
                log.warning("%s", error)
        requeue = self._before.get(self._asked or 0)
        self._restore()
        if told and self._asked not in (None, signal.SIGINT, signal.SIGTERM) and callable(requeue):
            requeue(self._asked, None)

    def _save(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if isinstance(module, Algorithm) and trainer.global_step == self._step:
            module.restore_progress(self._progress)  # the batch is made again
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ReplayDataModule):
            # a batch already handed out is drawn again
            data.position = self._drawn_before + trainer.global_step
        path = self._path(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        log.info("interrupted at step %d; continue with --ckpt_path %s", trainer.global_step, path)

    @staticmethod
    def _path(trainer: lightning.Trainer) -> str:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        return f"{folder}/last.ckpt"

    def _restore(self) -> None:
        for number, handler in self._before.items():
            self._handle(number, handler)
        self._before = {}

    @staticmethod
    def _handle(number: int, handler: Callable[..., Any] | signal.Handlers) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            if number != signal.SIGINT:  # schedulers repeat themselves
                return
            self._at_once = True  # perhaps in the middle of an optimizer step: not to be saved
            raise KeyboardInterrupt
        self._asked = number
        log.info("%s: stopping with a checkpoint", signal.Signals(number).name)
        if self._alone and not self._last_step_ends():
            interrupts.stop()

    def _last_step_ends(self) -> bool:
        """Whether all gradient steps are made; what belongs to the last one is not made again."""
        trainer = self._trainer
        return trainer is not None and trainer.global_step == trainer.max_steps
