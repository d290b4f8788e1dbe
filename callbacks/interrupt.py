"""A checkpoint when a run is interrupted."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

import lightning

from nlac_lightning.data import ReplayDataModule
from nlac_lightning.distributed import gather

log = logging.getLogger(__name__)


class InterruptCheckpoint(lightning.Callback):
    """Writes ``last.ckpt`` on Ctrl-C, so that ``--ckpt_path last`` continues.

    A gradient step under way is finished first, with the rollouts and the validation that belong
    to it, so that the continued run equals one that was never stopped. A second Ctrl-C stops at
    once; the checkpoint then holds whatever there is of that step. Episodes that were already
    committed stay in any case.
    """

    def __init__(self) -> None:
        self._in_step = self._asked = False
        self._before: Any = None

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if any(gather(self._asked)):  # all processes stop after the same step
            raise KeyboardInterrupt
        self._in_step = True

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._in_step = False

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
        if not isinstance(exception, KeyboardInterrupt):
            self._restore()  # after an interrupt, Lightning ignores the signal until it is done
            return
        if not trainer.optimizers:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ReplayDataModule):
            data.position = trainer.global_step  # a batch already handed out is drawn again
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = f"{folder}/last.ckpt"
        trainer.save_checkpoint(path)
        log.info("interrupted at step %d; continue with --ckpt_path %s", trainer.global_step, path)

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked or not self._in_step:
            raise KeyboardInterrupt
        self._asked = True
        log.info("stopping after this step; Ctrl-C again stops at once")
