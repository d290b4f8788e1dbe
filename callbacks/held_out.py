"""Evaluates the untrained base before training and the trained policy after it."""

from __future__ import annotations

import logging
from typing import Any

import lightning
from tqdm.auto import tqdm

from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.distributed import gather, rank, world_size
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.evaluation.records import EvaluationResult
from nlac_lightning.report.evaluation import (
    evaluation_folder,
    scalars,
    write_comparison,
    write_result,
)

log = logging.getLogger(__name__)


class HeldOutEvaluation(lightning.Callback):
    """Plays the same held-out tasks with the base and the trained policy; writes what was seen.

    Under the trainer's log folder: ``evaluation/base.json`` and ``trained.json``, the transcripts
    as HTML and text, ``table.txt``.

    Args:
        split: ``val`` or ``test``.
        tasks: number of tasks; None takes all.
        transcripts: episodes in each transcript.
    """

    def __init__(
        self, split: str = "test", tasks: int | None = None, transcripts: int = 24
    ) -> None:
        require_choice("held_out.split", split, ("val", "test"))
        if tasks is not None:
            require_positive("held_out.tasks", tasks)
        require_positive("held_out.transcripts", transcripts)
        self.split, self.tasks, self.transcripts = split, tasks, transcripts
        self.results: dict[str, EvaluationResult] = {}

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if "base" not in self.results:
            self._evaluate(trainer, pl_module, "base")

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        if trainer.interrupted:
            return
        self._evaluate(trainer, pl_module, "trained")
        folder = evaluation_folder(trainer)
        if trainer.is_global_zero:
            results = [self.results[name] for name in ("base", "trained")]
            write_comparison(folder, results)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Evaluate now what was stopped between its last step and its evaluation.

        Continuing such a run trains nothing, so that Lightning calls no hook of training.
        """
        if "base" in self.results and "trained" not in self.results:
            self.on_train_end(trainer, pl_module)

    def _evaluate(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, policy: str
    ) -> None:
        if not isinstance(pl_module, Algorithm):
            raise ConfigError(
                "trainer.callbacks", "HeldOutEvaluation needs an Algorithm", "drop it"
            )
        evaluator = pl_module.evaluator()
        tasks = list(evaluator.env.tasks(self.split))[: self.tasks]
        own = tasks[rank() :: world_size()]
        adapter = "base" if policy == "base" else "online"
        total = len(own) * evaluator.config.trials
        bar = tqdm(total=total, desc=f"{policy} on {self.split} tasks", leave=False)
        with bar, pl_module.backbone.whole():
            played = gather(evaluator.play(own, adapter, policy, bar.update))
        order = {task.id: i for i, task in enumerate(tasks)}
        episodes = sorted((e for part in played for e in part), key=lambda e: order[e.task_id])
        result = EvaluationResult(policy, self.split, episodes, evaluator.env.name)
        self.results[policy] = result
        folder = evaluation_folder(trainer)
        if not trainer.is_global_zero:
            return
        write_result(folder, result, self.transcripts)
        for logger in trainer.loggers:
            logger.log_metrics(scalars(result, f"{self.split}/{policy}"), step=trainer.global_step)
        success = 100 * result.summary()["success"]
        log.info("%s policy: %.0f%% of %d tasks solved", policy, success, len(tasks))

    def state_dict(self) -> dict[str, Any]:
        return {"results": {name: result.to_json() for name, result in self.results.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results = {
            name: EvaluationResult.from_json(text) for name, text in state_dict["results"].items()
        }
