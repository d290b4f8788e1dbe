"""Runs the quickstart's loop at small size for hours and measures what grows.

    python benchmarks/soak.py --minutes 120

Prints the slope of the resident memory in MB per 100 gradient steps (least squares after the
warm-up), the range of open files, the evicted episodes and how much slower the last quarter's
steps are than the first's (medians of CPU time, as multiples of a fixed piece of work timed beside
each step, so that other processes on the machine do not count). Status 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from tiny_run import make_model, make_run

CAPACITY = 60
BOUNDS = {"memory slope": 1.0, "open files, range": 0.0, "slowdown": 5.0}
"""What must hold: MB per 100 steps, files, percent."""


class Watch(lightning.Callback):
    """Notes memory, open files and cost of every step; ends the run when time is up."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.megabytes: list[float] = []
        self.files: list[int] = []
        self.steps: list[float] = []
        self.clock = time.process_time()
        self.written = self.held = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        self.megabytes.append(_resident())
        self.files.append(len(os.listdir("/proc/self/fd")))
        spent = time.process_time() - self.clock
        self.steps.append(spent / fixed_work())
        buffer = trainer.datamodule.buffer
        self.written, self.held = buffer.high_water_mark, buffer.num_episodes
        if step % 200 == 0:
            print(f"step {step}: {self.megabytes[-1]:.1f} MB, {self.held} episodes", flush=True)
        trainer.should_stop = time.monotonic() > self.end
        self.clock = time.process_time()


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def fixed_work() -> float:
    """CPU seconds of a piece of work that is always the same.

    Other processes slow it down as they do the steps, so a step's multiple of it tells a run that
    slows down from a machine that does.
    """
    began = time.process_time()
    square = torch.ones(192, 192)
    for _ in range(8):
        square = torch.tanh(square @ square)
    sum(len(str(number)) for number in range(5000))
    return time.process_time() - began


def slope(values: list[float]) -> float:
    """Least-squares growth per 100 steps."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0] * 100)


def main() -> None:
    """Print the table; write the rows with ``--json``; status 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--warmup", type=int, default=200, help="steps before the measurement")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    watch = Watch(options.minutes)
    with tempfile.TemporaryDirectory() as work:
        model = make_model(Path(work, "model"))
        run = make_run(Path(work), model, steps=10**7, capacity=CAPACITY, extra=[watch])
        trainer, module, data = run
        gc.collect()
        trainer.fit(module, data)
    memory, files = watch.megabytes[options.warmup :], watch.files[options.warmup :]
    steps = watch.steps[options.warmup :]
    if len(memory) < 100:
        sys.exit(f"only {len(watch.files)} steps: give it more minutes")
    quarter = len(steps) // 4
    first, last = np.median(steps[:quarter]), np.median(steps[-quarter:])
    rows = [
        ("gradient steps", len(watch.files), "steps"),
        ("episodes written", watch.written, "episodes"),
        ("episodes evicted", watch.written - watch.held, "episodes"),
        ("memory at the end", memory[-1], "MB"),
        ("memory slope", slope(memory), "MB per 100 steps"),
        ("open files, range", max(files) - min(files), "files"),
        ("slowdown", 100 * (last / first - 1), "percent"),
    ]
    for name, value, unit in rows:
        bound = f"  (at most {BOUNDS[name]:g})" if name in BOUNDS else ""
        print(f"{name:<20}{value:>10.3f} {unit}{bound}")
    if options.json:
        settings = {"minutes": options.minutes, "warmup": options.warmup, "capacity": CAPACITY}
        written = [{"name": n, "value": v, "unit": u, "settings": settings} for n, v, u in rows]
        options.json.write_text(json.dumps({"rows": written}, indent=2) + "\n")
    sys.exit(any(value > BOUNDS.get(name, np.inf) for name, value, _ in rows))


if __name__ == "__main__":
    main()
