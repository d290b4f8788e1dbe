"""What runs of several algorithms and seeds reached, read from their TensorBoard files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from nlac_lightning.report.curves import EVENT_FILES, Curve, read_scalars

HEADER = ("algorithm", "seeds", "success", "steps", "episodes", "generated tokens")


@dataclass(frozen=True)
class RunResult:
    """One run; nan where nothing was logged.

    Attributes:
        state: ``finished``, ``failed``, ``interrupted`` or ``waiting``.
        base, success: success rates in [0, 1] of the untrained and of the trained policy on the
            same held-out tasks.
        measured: where ``success`` comes from, such as ``test/trained/success``.
        steps, episodes, tokens: gradient steps, environment episodes and generated tokens.
    """

    algorithm: str
    seed: int
    state: str
    base: float = math.nan
    success: float = math.nan
    measured: str = ""
    steps: float = math.nan
    episodes: float = math.nan
    tokens: float = math.nan


def read_run(folder: Path, algorithm: str, seed: int, state: str) -> RunResult:
    """The result of the run below ``folder``; whatever an unfinished run has logged counts too.

    Success is that of the held-out evaluation after training, else of the last validation.
    """
    scalars: dict[str, Curve] = {}
    for events in sorted({file.parent for file in folder.rglob(EVENT_FILES)}):
        scalars |= read_scalars(events)
    tags: list[str] = [t for t in ("test/trained/success", "val/trained/success") if t in scalars]
    tags += ["val/success"] if scalars.get("val/success") else []
    measured = tags[0] if tags else ""
    base = "val/base/success" if measured.startswith("val") else "test/base/success"
    return RunResult(
        algorithm,
        seed,
        state,
        base=_last(scalars, base),
        success=_last(scalars, measured),
        measured=measured,
        steps=max((points[-1][0] for points in scalars.values() if points), default=math.nan),
        episodes=_last(scalars, "env/episodes"),
        tokens=_last(scalars, "gen/tokens"),
    )


def comparison(results: Sequence[RunResult]) -> str:
    """Plain text: the base model, then a row per algorithm with mean and spread over its seeds.

    The spread is the sample standard deviation over seeds, then the lowest and the highest seed.
    Runs that did not finish are left out of the row and named below the table.
    """
    done = [result for result in results if result.state == "finished"]
    bases = [r.base for r in done if not math.isnan(r.base)]
    rows: list[tuple[str, ...]] = [HEADER, ("base", str(len(bases)), spread(bases), "0", "0", "0")]
    for algorithm in dict.fromkeys(result.algorithm for result in results):
        own = [result for result in done if result.algorithm == algorithm]
        rows.append(
            (
                algorithm,
                str(len(own)),
                spread([r.success for r in own]),
                *(_mean([getattr(r, name) for r in own]) for name in ("steps", "episodes")),
                _mean([r.tokens for r in own]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    measured = sorted({result.measured for result in done if result.measured})
    notes = [f"success: {', '.join(measured) or 'not measured'}; mean ± standard deviation"]
    notes[0] += " over seeds [lowest, highest]"
    if not bases:
        notes.append("the base model was not played: add HeldOutEvaluation to trainer.callbacks")
    notes += [f"{r.algorithm}, seed {r.seed}: {r.state}" for r in results if r not in done]
    return "\n".join([*lines, "", *notes])


def spread(values: Sequence[float]) -> str:
    """``0.42 ± 0.03 [0.39, 0.45]``, one value as it is, ``-`` for none."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else "-"
    return f"{fmean(known):.2f} ± {stdev(known):.2f} [{min(known):.2f}, {max(known):.2f}]"


def rows_json(results: Sequence[RunResult]) -> str:
    """One row for each run that has a success rate, for scripts."""
    rows = [
        {
            "name": f"{result.algorithm}/seed_{result.seed}",
            "value": result.success,
            "unit": "success",
            "settings": {
                name: None if value != value else value
                for name, value in vars(result).items()
                if name != "success"
            },
        }
        for result in results
        if not math.isnan(result.success)
    ]
    return json.dumps({"rows": rows}, indent=1)


def _last(scalars: dict[str, Curve], tag: str) -> float:
    return scalars[tag][-1][1] if scalars.get(tag) else math.nan


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{fmean(known):,.0f}" if known else "-"
