"""The part of the table that shows success by groups of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nlac_lightning.evaluation.breakdown import breakdown
from nlac_lightning.evaluation.records import EvaluationResult
from nlac_lightning.report.table import COLUMN_WIDTH, side_by_side
from nlac_lightning.report.text import one_line

SHOWN_K = 4
"""pass^k and pass@k are shown up to this k; the JSON file has all."""


def breakdown_table(results: Sequence[EvaluationResult]) -> str:
    """Plain text: a column per result; intervals at 95%, ``n`` counts tasks."""
    found = [breakdown(result) for result in results]
    groups = [name for name in _union(f["groups"] for f in found)]
    ks = [k for k in _union(f["pass^k"] for f in found) if int(k) <= SHOWN_K]
    repeated = len(ks) > 1
    labels = [f"{results[0].env}, {results[0].split}", *groups]
    labels += [f"{kind}{k}" for kind in ("pass^", "pass@") for k in ks if repeated]
    labels += ["mean turns", "tool errors", "invalid actions", "user failures"]
    columns = []
    for result, one in zip(results, found, strict=True):
        column = [one_line(result.policy, COLUMN_WIDTH)]
        column += [_success(one["groups"].get(name)) for name in groups]
        for kind in ("pass^k", "pass@k"):
            column += [_show(one[kind].get(k)) for k in ks if repeated]
        column += [
            _show(one["mean_turns"], 1),
            _show(one["tool_error_rate"]),
            _show(one["invalid_rate"]),
            str(one["user_failures"]),
        ]
        columns.append(column)
    return side_by_side(labels, columns)


def _union(names: Any) -> list[str]:
    return list(dict.fromkeys(name for some in names for name in some))


def _success(group: dict[str, Any] | None) -> str:
    if group is None or group["success"] is None:
        return "-"
    return f"{group['success']:.2f} [{group['low']:.2f}, {group['high']:.2f}] n={group['tasks']}"


def _show(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
