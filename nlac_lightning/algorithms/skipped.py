"""Gradient steps that change nothing because their loss or gradient is no number."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlac_lightning.errors import StoppedRun

log = logging.getLogger(__name__)

KEPT = 20
"""Files of skipped batches that one run writes."""


class NumericsError(StoppedRun):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class SkippedSteps:
    """Writes the batch of each step whose numbers failed, and stops a run that only fails.

    Args:
        limit: such steps in a row that stop the run.

    Attributes:
        reason: why the step under way was skipped; None if it was not.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reason: str | None = None
        self._row = self._written = 0

    def after_step(self, folder: Path, step: int, batch: Sequence[Any]) -> None:
        """Look at the step just made.

        The file ``step_N.json`` in ``folder`` holds the reason and the batch, the fields of each
        item as they are; with the checkpoint before it, they make the step again.

        Raises:
            NumericsError: it was the last of ``limit`` in a row.
        """
        reason, self.reason = self.reason, None
        if reason is None:
            self._row = 0
            return
        self._row += 1
        path = folder / f"step_{step:06d}.json"
        if self._written < KEPT:
            self._write(path, {"step": step, "reason": reason, "batch": list(batch)})
        if self._row >= self.limit:
            raise NumericsError(
                f"{self._row} gradient steps in a row were skipped, the last because of a "
                f"{reason}; the weights are those before them. Fix: look at {folder}, lower "
                "model.optimizer.lr, and continue from the last checkpoint"
            )

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, default=_plain), encoding="utf-8")
            self._written += 1
            log.warning("its batch is in %s", path)
        except (OSError, ValueError, TypeError) as error:  # a full disk costs the file alone
            log.warning("%s could not be written: %s", path, error)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]
