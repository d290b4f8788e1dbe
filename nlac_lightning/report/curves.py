"""Learning curves of several runs, drawn from their TensorBoard event files.

Runs that differ only in a folder ``seed_N`` are seeds of one thing: they share a colour, and their
mean is drawn over them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from nlac_lightning.errors import ConfigError, require_choice

EVENT_FILES = "events.out.tfevents.*"
AXES: dict[str, tuple[str | None, str]] = {
    "step": (None, "gradient steps"),
    "episodes": ("env/episodes", "environment episodes"),
    "generated_tokens": ("gen/tokens", "generated tokens"),
}
"""Name of an x axis: the running count that it is read from (None: the step) and its label."""

SEED = re.compile(r"seed_\d+")
SUCCESS = ("val/success", "test/success")
"""Drawn where no metric is named: the first that some run has."""

Curve = list[tuple[float, float]]
"""Points (x, y) with x rising."""


def plot_runs(
    run_dirs: Sequence[Path],
    out: Path,
    metrics: Sequence[str] = (),
    x: str | None = None,
) -> list[str]:
    """Draw each metric (a row) against each x axis (a column), one line per run.

    Runs whose folders differ only in ``seed_N`` are drawn thin in one colour, and the mean over
    them thick, at the steps that all of them have. Where a run of its own also has ``<metric>_low``
    and ``<metric>_high``, its interval is shaded. A run that
    was interrupted and resumed in the same folder shows the points of the resumed run wherever
    both have some. Folders below a run's folder that hold event files are runs of their own.

    Args:
        run_dirs: folders with event files, at any depth.
        out: image to write; its ending (``.png``, ``.svg``, ``.pdf``) sets the format.
        metrics: scalar tags; empty takes ``val/success``, or where no run has it ``test/success``:
            the evaluations before and after training, as :class:`HeldOutEvaluation` logs them.
        x: ``step``, ``episodes`` (``env/episodes``) or ``generated_tokens`` (``gen/tokens``);
            None draws all for which some run has the data.

    Returns:
        One sentence per run and tag that is missing, also printed below the picture.

    Raises:
        ConfigError: a folder has no event files, no run has anything to draw, or ``x`` or the
            ending of ``out`` is unknown.
    """
    if x is not None:
        require_choice("x", x, tuple(AXES))
    runs = {name: read_scalars(folder) for name, folder in _named(run_dirs)}
    tags = {tag for scalars in runs.values() for tag in scalars}
    metrics = metrics or [next((tag for tag in SUCCESS if tag in tags), SUCCESS[0])]
    notes: list[str] = []
    panels: dict[tuple[str, str], dict[str, Curve]] = {}
    for axis in AXES if x is None else (x,):
        count, _ = AXES[axis]
        for name, scalars in runs.items():
            if count is not None and count not in scalars:
                notes.append(f"{name}: no {count}")
                continue
            for metric in metrics:
                if metric in scalars:
                    curve = _curve(scalars, metric, count)
                    panels.setdefault((metric, axis), {})[name] = curve
                elif (note := f"{name}: no {metric}") not in notes:
                    notes.append(note)
    rows = [metric for metric in metrics if any(metric == row for row, _ in panels)]
    columns = [axis for axis in AXES if any(axis == column for _, column in panels)]
    if not panels:
        known = ", ".join(sorted(tags)) or "none"
        raise ConfigError("metrics", "; ".join(notes), f"name scalars that exist: {known}")

    figure = Figure(figsize=(4.6 * len(columns), 3.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    groups: dict[str, list[str]] = {}
    for name in runs:
        groups.setdefault(_without_seed(name), []).append(name)
    handles: dict[str, Line2D] = {}
    for (metric, axis), curves in panels.items():
        axes = grid[rows.index(metric)][columns.index(axis)]
        count, label = AXES[axis]
        for i, (group, names) in enumerate(groups.items()):
            drawn = {name: curves[name] for name in names if name in curves}
            if len(drawn) == 1:
                band = _band(runs[next(iter(drawn))], metric, count)
                axes.fill_between(*band, color=f"C{i % 10}", alpha=0.15, linewidth=0)
            if drawn:
                steps = [[step for step, _ in runs[name][metric]] for name in drawn]
                line = _draw_seeds(axes, steps, list(drawn.values()), f"C{i % 10}")
                handles.setdefault(group, line)
        axes.set(xlabel=label, ylabel=metric)
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if "success" in metric:
            axes.set_ylim(-0.03, 1.03)
    figure.legend(
        [handles[group] for group in groups if group in handles],
        [
            f"{group} ({len(names)} seeds)" if len(names) > 1 else group
            for group, names in groups.items()
            if group in handles
        ],
        loc="outside upper center",
        ncols=len(columns),
        frameon=False,
    )
    if notes:
        figure.supxlabel("missing: " + "; ".join(notes), fontsize=7, color="gray", wrap=True)
    try:
        figure.savefig(out, dpi=150)
    except ValueError as error:
        raise ConfigError("out", str(error), "end it in .png, .svg or .pdf") from error
    return notes


def _draw_seeds(
    axes: Axes, steps: Sequence[Sequence[float]], curves: Sequence[Curve], color: str
) -> Line2D:
    """One curve, or several of them thin with their mean; returns the line for the legend."""
    style: dict[str, Any] = {} if len(curves) == 1 else {"linewidth": 0.8, "alpha": 0.4}
    for curve in curves:
        (line,) = axes.plot(*_columns(curve), marker="o", markersize=3, color=color, **style)
    if len(curves) > 1:
        (line,) = axes.plot(*_columns(mean_curve(steps, curves)), linewidth=2.2, color=color)
    return line


def _named(run_dirs: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Every folder that holds event files, under a name that tells it from the others."""
    folders: list[Path] = []
    for run_dir in map(Path, run_dirs):
        found = sorted({file.parent.resolve() for file in run_dir.rglob(EVENT_FILES)})
        if not found:
            raise ConfigError("run_dirs", f"{run_dir} holds no event files", "name a run's folder")
        folders += [folder for folder in found if folder not in folders]
    # The shortest tails of the paths that are all different, without an end that all share.
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    end = 0
    while end < depth - 1 and len({folder.parts[-end - 1] for folder in folders}) == 1:
        end += 1
    return (
        ("/".join(folder.parts[-depth : len(folder.parts) - end]), folder) for folder in folders
    )


def _without_seed(name: str) -> str:
    return "/".join(part for part in name.split("/") if not SEED.fullmatch(part)) or "run"


def _columns(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def mean_curve(steps: Sequence[Sequence[float]], curves: Sequence[Curve]) -> Curve:
    """Mean x and mean y over curves at each gradient step that all of them have.

    Args:
        steps: the gradient steps of each curve's points.
        curves: points (x, y), as many as steps.
    """
    by_step = [dict(zip(own, curve, strict=True)) for own, curve in zip(steps, curves, strict=True)]
    common = sorted(set.intersection(*(set(points) for points in by_step)))
    return [
        (fmean(points[step][0] for points in by_step), fmean(points[step][1] for points in by_step))
        for step in common
    ]


def read_scalars(folder: Path) -> dict[str, Curve]:
    """Each scalar tag's (step, value), without points that a resumed run has overwritten.

    What :class:`HeldOutEvaluation` logged of the base and of the trained policy is one curve more:
    ``test/base/success`` and ``test/trained/success`` make ``test/success``.
    """
    accumulator = event_accumulator.EventAccumulator(
        str(folder), size_guidance={event_accumulator.SCALARS: 0}, purge_orphaned_data=False
    )
    accumulator.Reload()
    scalars: dict[str, Curve] = {}
    for tag in accumulator.Tags()[event_accumulator.SCALARS]:
        points: Curve = []
        for event in sorted(accumulator.Scalars(tag), key=lambda event: event.wall_time):
            while points and points[-1][0] >= event.step:
                points.pop()
            points.append((event.step, event.value))
        scalars[tag] = points
    for split in ("val", "test"):
        for value in ("success", "success_low", "success_high"):
            points = scalars.get(f"{split}/base/{value}", [])
            points = points + scalars.get(f"{split}/trained/{value}", [])
            if points:
                scalars.setdefault(f"{split}/{value}", points)
    return scalars


def _curve(scalars: dict[str, Curve], metric: str, count: str | None) -> Curve:
    """The metric against a running count: at each point, the count last logged by then."""
    if count is None:
        return scalars[metric]
    steps = [step for step, _ in scalars[count]]
    curve = []
    for step, value in scalars[metric]:
        # Before the first count is logged, nothing was played or generated for training; at step
        # 0 there was no training that could have used it.
        at = bisect_right(steps, step) if step else 0
        curve.append((scalars[count][at - 1][1] if at else 0.0, value))
    return curve


def _band(
    scalars: dict[str, Curve], metric: str, count: str | None
) -> tuple[list[float], list[float], list[float]]:
    """The interval's xs, lows and highs; empty where it was not logged."""
    low, high = f"{metric}_low", f"{metric}_high"
    if low not in scalars or high not in scalars:
        return [], [], []
    # An interrupted run may have written one limit of its last point and not the other.
    limits = list(zip(_curve(scalars, low, count), _curve(scalars, high, count), strict=False))
    return [x for (x, _), _ in limits], [y for (_, y), _ in limits], [y for _, (_, y) in limits]
