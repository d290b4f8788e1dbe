"""The target successor model: a moving average of the online adapter."""

from __future__ import annotations

from typing import Any

import lightning

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.interrupts import whole


class EMACallback(lightning.Callback):
    """target <- tau * online + (1 - tau) * target after each gradient step, on the adapters only.

    The target starts equal to the online adapter, is never trained, and is part of every
    checkpoint.

    Args:
        tau: share of the online adapter that flows in at each step, in (0, 1]. Small values make
            slow, steady targets (0.005 to 0.1 is usual); 1 means no target network.
        every_n_steps: gradient steps between updates.

    Source: paper, theta-bar.
    """

    def __init__(self, tau: float = 0.02, every_n_steps: int = 1) -> None:
        require_positive("ema.tau", tau)
        require_positive("ema.tau", 1 - tau, zero=True)
        require_positive("ema.every_n_steps", every_n_steps)
        self.tau, self.every_n_steps = tau, every_n_steps
        self._done: int | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if not isinstance(pl_module, Algorithm):
            raise ConfigError("trainer.callbacks", "EMACallback needs an Algorithm", "remove it")

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Make up for a step that was stopped before its end."""
        if self._done is not None and self._done < trainer.global_step:
            self._update(trainer, pl_module)
        self._done = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._update(trainer, pl_module)

    def _update(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        assert isinstance(module, Algorithm)
        with whole():
            if trainer.global_step % self.every_n_steps == 0:
                module.backbone.copy_online_to_target(self.tau)
            self._done = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done = state_dict["step"]
