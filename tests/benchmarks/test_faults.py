"""A run that is killed or stopped anywhere goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_kills_and_stop_signals_harm_nothing(smollm2_path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "faults.py")),
            *("--kills", "3", "--signals", "3", "--json", str(tmp_path / "rows.json")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = {(row["settings"]["by"], row["name"]): row["value"] for row in rows}
    assert found["kills", "kills"] == 3 and found["stop signals", "stop signals"] == 3
    for kind in ("kills", "stop signals"):
        assert found[kind, "runs ended"] >= 1 and found[kind, "steps compared"] >= 6
    assert not any(row["value"] for row in rows if row["unit"] == "faults")
