"""The table, rows and figure of ``benchmarks/learning.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for a two-sided 95% interval of the mean of so many runs."""
SCORES = ("auroc", "spearman", "calibration", "monotone", "monotone_state")
COSTS = ("step", "episodes", "generated_tokens", "cpu_seconds")
UNLEARNED = ("uniform", "heuristic", "one_step_critic", "optimal")

Result = dict[str, Any]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean; nan for a number of runs that has no entry."""
    if len(values) not in T_95:
        return math.nan
    return T_95[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs by method, and by step size where a method has several."""
    several = {
        r["method"]
        for r in results
        for q in results
        if q["method"] == r["method"] and q["lr"] != r["lr"]
    }
    found: dict[str, list[Result]] = {}
    for r in results:
        name = f"{r['method']} lr={r['lr']:g}" if r["method"] in several else r["method"]
        found.setdefault(name, []).append(r)
    return found


def measured(runs: Sequence[Result]) -> dict[str, list[float]]:
    """Last measurements of the runs of one method, by name."""
    last = [r["rows"][-1] for r in runs]
    values = {"success": [row["success"] for row in last]}
    if all(r["ceiling"] for r in runs):
        values["of ceiling"] = [
            row["success"] / r["ceiling"] for row, r in zip(last, runs, strict=True)
        ]
    scores = SCORES if runs[0]["critic"] else ()
    values |= {name: [row[name] for row in last] for name in (*scores, *COSTS)}
    if all(len(r["skills"]) == 2 for r in runs):
        for role in runs[0]["skills"][0]:
            values[f"forgotten {role}"] = [
                r["skills"][0][role] - r["skills"][1][role] for r in runs
            ]
    return values


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each method and measure, with the value of each seed."""
    rows = []
    for name, runs in groups(results).items():
        settings = {"level": runs[0]["level"], "lr": runs[0]["lr"]}
        for measure, values in measured(runs).items():
            half = half_width(values)
            rows.append(
                {
                    "name": f"{name}: {measure}",
                    "value": float(np.mean(values)),
                    "unit": "s" if measure == "cpu_seconds" else "",
                    "settings": {
                        **settings,
                        "half_width_95": None if math.isnan(half) else half,
                        "seeds": {r["seed"]: v for r, v in zip(runs, values, strict=True)},
                    },
                }
            )
    return rows


def _cell(values: Sequence[float], digits: int) -> str:
    half = half_width(values)
    mean = f"{np.mean(values):.{digits}f}"
    return mean if math.isnan(half) else f"{mean} ± {half:.{digits}f}"


def table(results: Sequence[Result]) -> str:
    """Last measurements by method; above them what needs no learning."""
    columns = [("success", 3), ("of ceiling", 2), ("auroc", 2), ("spearman", 2)]
    columns += [("calibration", 3), ("monotone_state", 2), ("episodes", 0), ("cpu_seconds", 0)]
    lines = [f"{'':22}" + "".join(f"{name:>16}" for name, _ in columns)]
    unlearned = list({r["seed"]: r["baselines"] for r in results}.values())
    for name in UNLEARNED:
        line = f"{name:22}{_cell([b[name] for b in unlearned], 3):>16}"
        if name == "one_step_critic":  # sees no difference where scores are taken
            line += f"{'-':>16}{0.5:>16.2f}{0:>16.2f}"
        lines.append(line)
    for name, runs in groups(results).items():
        values = measured(runs)
        cells = [_cell(values[c], digits) if c in values else "-" for c, digits in columns]
        lines.append(f"{name:22}" + "".join(f"{cell:>16}" for cell in cells))
    lines += ["", "skill lost in training, by role (online adapter)"]
    for name, runs in groups(results).items():
        values = measured(runs)
        lost = {k.partition(" ")[2]: v for k, v in values.items() if k.startswith("forgotten")}
        lines.append(f"{name:22}" + ", ".join(f"{k} {np.mean(v):.2f}" for k, v in lost.items()))
    return "\n".join(lines)


def draw(results: Sequence[Result], out: Path) -> None:
    """Exact success against each cost: the mean over seeds and its 95% interval."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    labels = ("gradient steps", "episodes", "generated tokens", "CPU-seconds")
    for n, (cost, label) in enumerate(zip(COSTS, labels, strict=True)):
        axes = figure.add_subplot(1, len(COSTS), n + 1)
        for i, (name, runs) in enumerate(groups(results).items()):
            length = min(len(r["rows"]) for r in runs)
            x = np.mean([[row[cost] for row in r["rows"][:length]] for r in runs], axis=0)
            y = np.array([[row["success"] for row in r["rows"][:length]] for r in runs])
            half = np.array([half_width(column) for column in y.T])
            style = ("-", "--", ":")[i // 10]
            axes.plot(x, y.mean(0), style, color=f"C{i % 10}", label=name)
            axes.fill_between(x, y.mean(0) - half, y.mean(0) + half, color=f"C{i % 10}", alpha=0.15)
        axes.set(xlabel=label, ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("exact success on test tasks")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
