"""What can be reached in the language MDP, exactly: baselines, optimum, ceiling of each step.

    python benchmarks/mdp_levels.py [--seed 0] [--split test] [--json FILE]

One table per level. A ceiling is the success at the fixed point of an improvement step whose
critic says good with probability Q(s, a), started from the uniform policy. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nlac_lightning.analysis import FixedPoint, ImprovementStep, fixed_point
from nlac_lightning.analysis.fixed_point import LIMITS
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.levels import LEVELS, SHARES

STEPS = (
    ImprovementStep("refine"),
    ImprovementStep("refine_proportional"),
    ImprovementStep("refine", k=3),
    ImprovementStep("refine", k=4, rule="any"),
    ImprovementStep("accept"),
    ImprovementStep("refine_then_accept"),
    ImprovementStep("best_of_n", n=4),
)
TOLERANCE = 1e-7
UNIT = "success rate"


def ceiling(env: LanguageMDPEnv, step: ImprovementStep, split: str) -> FixedPoint:
    """Where ``step`` ends on the tasks of a split."""
    closed = step.kind in LIMITS
    return fixed_point(env.exact(split).mdp, step, tolerance=TOLERANCE, closed_form=closed)


def measure(level: int, seed: int, split: str) -> list[dict[str, Any]]:
    """All rows of one level."""
    env = LanguageMDPEnv(level, seed=seed)
    settings = {"level": level, "seed": seed, "split": split}
    rows = [
        {"name": f"level {level}: {name}", "value": value, "unit": UNIT, "settings": settings}
        for name, value in env.baselines(split).items()
    ]
    for step in STEPS:
        end = ceiling(env, step, split)
        run = {"iterations": end.iterations, "converged": end.converged}
        rows.append(
            {
                "name": f"level {level}: ceiling of {step.name}",
                "value": end.success,
                "unit": UNIT,
                "settings": {**settings, **run},
            }
        )
    return rows


def table(level: int, rows: list[dict[str, Any]]) -> str:
    """The rows of one level as text, with the share of the optimum."""
    names = [row["name"].partition(": ")[2] for row in rows]
    best = next(row["value"] for name, row in zip(names, rows, strict=True) if name == "optimal")
    width = max(map(len, names))
    shape = LEVELS[level].shape
    head = f"level {level}: {shape.rooms} rooms, {shape.exits} exits each, {shape.goals} goal(s)"
    lines = [head, "-" * len(head), f"{'':{width}}  success  of optimal"]
    for name, row in zip(names, rows, strict=True):
        note = "" if row["settings"].get("converged", True) else "  (still moving)"
        lines.append(f"{name:{width}}  {row['value']:7.3f}  {row['value'] / best:10.1%}{note}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables; write the rows with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which worlds")
    parser.add_argument("--split", choices=tuple(SHARES), default="test", help="whose tasks")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    written = []
    for level in LEVELS:
        rows = measure(level, options.seed, options.split)
        print(table(level, rows), end="\n\n", flush=True)
        written += rows
    if options.json:
        options.json.write_text(json.dumps({"rows": written}, indent=2) + "\n")


if __name__ == "__main__":
    main()
