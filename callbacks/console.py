"""Plain log lines while training, and a closing summary that says where everything is."""

from __future__ import annotations

import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.callbacks.held_out import HeldOutEvaluation
from nlac_lightning.data import ReplayDataModule
from nlac_lightning.errors import require_positive
from nlac_lightning.report.evaluation import comparison_text

log = logging.getLogger(__name__)

SHOWN = {
    "train/critic": "critic loss {:.2f}",
    "train/policy": "policy loss {:.2f}",
    "train/gate_agreement": "critic agrees {:.0%}",
    "train/critic_says_good": "good {:.0%}",
    "train/distilled": "distilled {:.0%}",
    "rollout/success": "rollouts solved {:.0%}",
}
"""Scalars of a log line and how they read."""


class Console(lightning.Callback):
    """Logs a line every few steps; at the end, results, times and what to run next.

    Args:
        every_n_steps: gradient steps between lines.
        next_steps: shown at the end; ``{checkpoint}`` and ``{log_dir}`` are filled in.
    """

    def __init__(self, every_n_steps: int = 1, next_steps: list[str] | None = None) -> None:
        require_positive("console.every_n_steps", every_n_steps)
        self.every_n_steps, self.next_steps = every_n_steps, next_steps or []
        self._clock = time.perf_counter()
        self._began = self._clock

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step % self.every_n_steps or not trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        parts = [text.format(values[name]) for name, text in SHOWN.items() if name in values]
        now = time.perf_counter()
        log.info(
            "step %d/%s  %s  (%.1f s)",
            trainer.global_step,
            trainer.max_steps if trainer.max_steps > 0 else "?",
            ", ".join(parts),
            now - self._clock,
        )
        self._clock = now

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if batch_idx == 0:
            self._clock = time.perf_counter()

    def teardown(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        if stage != "fit" or trainer.interrupted or not isinstance(pl_module, Algorithm):
            return
        log_dir = trainer.log_dir or "."  # all processes ask: it is sent from process 0
        if not trainer.is_global_zero:
            return
        lines = [""]
        held_out = [c for c in trainer.callbacks if isinstance(c, HeldOutEvaluation)]  # type: ignore[attr-defined]
        for callback in held_out:
            if callback.results:
                lines += [comparison_text(list(callback.results.values())), ""]
        lines += [f"{name:<14}{value}" for name, value in self._facts(trainer, pl_module, log_dir)]
        if self.next_steps:
            names = {"checkpoint": self._checkpoint(trainer), "log_dir": log_dir}
            lines += ["", "Next:", *(f"  {step.format(**names)}" for step in self.next_steps)]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    def _facts(
        self, trainer: lightning.Trainer, module: Algorithm, log_dir: str
    ) -> list[tuple[str, str]]:
        generator, seconds = module.generator, module.seconds
        made = generator.counts["generated_tokens"]
        read, asked = generator.counts["prefilled_tokens"], generator.counts["prompt_tokens"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        total = time.perf_counter() - self._began
        facts = [
            ("checkpoint", self._checkpoint(trainer)),
            ("curves", f"tensorboard --logdir {log_dir}"),
            ("transcripts", str(Path(log_dir, "evaluation"))),
            (
                "time",
                f"{total:.0f} s in all: {seconds['targets']:.0f} s targets, "
                f"{seconds['optimize']:.0f} s gradients; peak memory {peak:.1f} GiB",
            ),
            (
                "generation",
                f"{made} tokens in {generator.seconds:.0f} s "
                f"({made / max(generator.seconds, 1e-9):.0f}/s); of {asked} prompt tokens "
                f"{read} had to be processed ({asked / max(read, 1):.1f} times fewer)",
            ),
        ]
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ReplayDataModule):
            facts.insert(1, ("buffer", str(data.buffer.path)))
        return facts

    def _checkpoint(self, trainer: lightning.Trainer) -> str:
        callback = trainer.checkpoint_callback
        path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        if not path:
            return "none written"
        size = Path(path).stat().st_size / 2**20 if Path(path).is_file() else 0.0
        return f"{path} ({size:.0f} MiB)" if size else str(path)
