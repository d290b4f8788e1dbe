"""Files and scalars of an evaluation: results as JSON, transcripts, the comparison table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import lightning

from nlac_lightning.evaluation.breakdown import breakdown, breaks_down
from nlac_lightning.evaluation.records import EvaluationResult
from nlac_lightning.report.breakdown import breakdown_table
from nlac_lightning.report.table import comparison_table
from nlac_lightning.report.transcripts import write_html, write_text


def evaluation_folder(trainer: lightning.Trainer) -> Path:
    """The folder ``evaluation`` under the trainer's log folder, created if missing.

    All processes ask together: the trainer sends its log folder from process 0.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir, "evaluation")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_result(folder: Path, result: EvaluationResult, transcripts: int) -> None:
    """Write ``POLICY.json``, and its first ``transcripts`` episodes as HTML and text."""
    (folder / f"{result.policy}.json").write_text(result.to_json(), encoding="utf-8")
    write_html(folder / f"{result.policy}.html", result, transcripts)
    write_text(folder / f"{result.policy}.txt", result, transcripts)


def comparison_text(results: Sequence[EvaluationResult]) -> str:
    """The table with a column for each result.

    Where tasks were played more than once or the environment knows facts about them, it has a part
    with success by groups of tasks.
    """
    table = comparison_table(results)
    if any(breaks_down(result) for result in results):
        table += "\n\n" + breakdown_table(results)
    return table


def write_comparison(folder: Path, results: Sequence[EvaluationResult]) -> str:
    """Write the table as ``table.txt`` and return it; its part by groups as ``breakdown.json``."""
    table = comparison_text(results)
    if any(breaks_down(result) for result in results):
        found = {result.policy: breakdown(result) for result in results}
        text = json.dumps({"format": 1, "policies": found}, indent=1)
        (folder / "breakdown.json").write_text(text, encoding="utf-8")
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
    return table


def scalars(result: EvaluationResult, prefix: str) -> dict[str, float]:
    """The result's summary under ``prefix/``, without what could not be measured."""
    return {f"{prefix}/{k}": v for k, v in result.summary().items() if v == v}
