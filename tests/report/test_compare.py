"""The table of a comparison, from event files as a run leaves them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from nlac_lightning.report.compare import comparison, read_run, rows_json, spread


def write(folder: Path, **scalars: list[tuple[int, float]]) -> None:
    with SummaryWriter(str(folder)) as writer:
        for tag, points in scalars.items():
            for step, value in points:
                writer.add_scalar(tag.replace("__", "/"), value, step)


def finished(folder: Path, base: float, trained: float, tokens: float) -> None:
    write(
        folder / "logs/version_0",
        test__base__success=[(0, base)],
        test__trained__success=[(20, trained)],
        val__success=[(20, 0.0)],
        env__episodes=[(0, 8), (20, 40)],
        gen__tokens=[(19, tokens)],
    )


def test_mean_and_spread_over_seeds_with_the_base(tmp_path: Path) -> None:
    for seed, trained in enumerate((0.25, 0.5, 0.75)):
        finished(tmp_path / f"a{seed}", 0.125, trained, 1000.0 * (seed + 1))
    finished(tmp_path / "b0", 0.125, 0.5, 500.0)
    results = [read_run(tmp_path / f"a{seed}", "a", seed, "finished") for seed in range(3)]
    results.append(read_run(tmp_path / "b0", "b", 0, "finished"))
    results.append(read_run(tmp_path / "none", "b", 1, "failed"))
    lines = comparison(results).splitlines()
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:5]}
    assert cells == {
        "base": "4 0.12 ± 0.00 [0.12, 0.12] 0 0 0",
        "a": "3 0.50 ± 0.25 [0.25, 0.75] 20 40 2,000",
        "b": "1 0.50 20 40 500",
    }
    assert lines[-1] == "b, seed 1: failed"
    assert "test/trained/success" in comparison(results)
    rows = json.loads(rows_json(results))["rows"]
    assert [(row["name"], row["value"]) for row in rows[:2]] == [
        ("a/seed_0", 0.25), ("a/seed_1", 0.5),
    ]  # fmt: skip
    assert len(rows) == 4


def test_without_held_out_tasks_the_last_validation_counts(tmp_path: Path) -> None:
    write(tmp_path, val__success=[(5, 0.2), (10, 0.4)])
    result = read_run(tmp_path, "a", 0, "finished")
    assert (result.success, result.measured) == (pytest.approx(0.4), "val/success")
    assert math.isnan(result.base) and math.isnan(result.tokens)
    assert "HeldOutEvaluation" in comparison([result])


def test_nothing_measured_is_a_dash() -> None:
    assert spread([]) == spread([math.nan]) == "-"
    assert spread([0.5, math.nan]) == "0.50"
