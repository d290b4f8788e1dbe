"""A checkpoint when a run is interrupted."""

from __future__ import annotations

import logging

import lightning

from nlac_lightning.data import ReplayDataModule

log = logging.getLogger(__name__)


class InterruptCheckpoint(lightning.Callback):
    """Writes ``last.ckpt`` on Ctrl-C, so that ``--ckpt_path last`` continues.

    The gradient step under way is not part of it; its batch is drawn again. Episodes that were
    already committed stay.
    """

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        if not isinstance(exception, KeyboardInterrupt) or not trainer.optimizers:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ReplayDataModule):
            data.position = trainer.global_step
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = f"{folder}/last.ckpt"
        trainer.save_checkpoint(path)
        log.info("interrupted at step %d; continue with --ckpt_path %s", trainer.global_step, path)
