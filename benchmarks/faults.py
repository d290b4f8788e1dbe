"""Kills a training run at random moments with SIGKILL and looks at what is left.

    python benchmarks/faults.py --kills 100

A tiny run (see tiny_run.py) is killed, checked, and continued with the last checkpoint, until it
ends; then the next one starts. Every second kill comes at a random time, the others at a random
line of Python inside one phase (rollout, targets, backward, checkpoint, buffer, ema). After each
kill every checkpoint must be whole, the buffer sound, and no committed episode lost or doubled;
each step made again must have the losses of the run that was never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from tiny_run import make_model, make_run

from nlac_lightning import checkpoint
from nlac_lightning.algorithms.nlac import NLAC
from nlac_lightning.callbacks import EMACallback
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.rollout import Rollout

STEPS = 6
PHASES = ("start", "rollout", "targets", "backward", "checkpoint", "buffer", "ema")
LAST = Path("checkpoints", "last.ckpt")


@dataclass
class Kill:
    """Where a run is to be killed: after ``seconds``, or at a line inside a phase."""

    seconds: float | None = None
    phase: str = ""
    line: int = 0


class Losses(lightning.Callback):
    """Writes every number of each gradient step to a file, in full precision."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        shown = ("train/critic", "train/policy", "train/policy_kl", "train/grad_norm", "train/lr")
        values = [float(trainer.callback_metrics[name]).hex() for name in shown]
        line = f"step {trainer.global_step} {' '.join(values)}\n"
        os.write(self.handle, line.encode())


class Marks:
    """Marks the phase that the run is in, and kills it at the line where that is asked for."""

    def __init__(self, shared: mmap.mmap, kill: Kill) -> None:
        self.shared, self.kill, self.lines = shared, kill, kill.line

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Let ``owner.name`` mark the phase while it runs."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before = self.shared[0]
            self.shared[0] = PHASES.index(phase)
            tracing = self.kill.phase == phase and sys.gettrace() is None
            if tracing:
                sys.settrace(self._trace)
            try:
                return inner(*args, **kwargs)
            finally:
                if tracing:
                    sys.settrace(None)
                self.shared[0] = before

        setattr(owner, name, marked)

    def _trace(self, frame: Any, event: str, argument: Any) -> Callable[..., Any]:
        self.lines -= event == "line"
        if self.lines < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


def train(folder: Path, model: Path, shared: mmap.mmap, kill: Kill) -> None:
    """One life of the run in ``folder``, in a process of its own."""
    handle = os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append = ReplayBuffer.append

    def told(self: ReplayBuffer, episode: Any) -> int:
        number = append(self, episode)
        os.write(handle, f"episode {episode.seed}\n".encode())
        return number

    ReplayBuffer.append = told  # type: ignore[method-assign]
    marks = Marks(shared, kill)
    marks.wrap(Rollout, "_choose", "rollout")
    marks.wrap(Rollout, "_advance", "rollout")
    marks.wrap(NLAC, "critic_targets", "targets")
    marks.wrap(NLAC, "gradient_step", "backward")
    marks.wrap(checkpoint, "write_whole", "checkpoint")
    marks.wrap(ReplayBuffer, "append", "buffer")
    marks.wrap(EMACallback, "_update", "ema")
    trainer, module, data = make_run(folder, model, STEPS, extra=[Losses(handle)])
    resume = folder / LAST if (folder / LAST).is_file() else None
    trainer.fit(module, data, ckpt_path=str(resume) if resume else None)


def live(folder: Path, model: Path, kill: Kill) -> tuple[bool, str, float]:
    """Run one life; whether it was killed, in which phase, and its seconds."""
    with mmap.mmap(-1, 1) as shared:
        began = time.monotonic()
        child = os.fork()
        if not child:
            code = 0
            try:
                os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                train(folder, model, shared, kill)
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        if kill.seconds is not None:
            end = began + kill.seconds
            while (
                time.monotonic() < end
                and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            ):
                time.sleep(0.002)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code > 0:
            raise SystemExit(f"the run itself failed, see {folder / 'output'}")
        return code < 0, PHASES[shared[0]], time.monotonic() - began


def read_told(folder: Path) -> tuple[list[int], list[tuple[int, str]]]:
    """What all lives in ``folder`` wrote down: seeds of committed episodes, losses of steps."""
    seeds, losses = [], []
    path = folder / "told"
    for line in path.read_text().splitlines() if path.is_file() else ():
        kind, number, *values = line.split()
        if kind == "episode":
            seeds.append(int(number))
        else:
            losses.append((int(number), " ".join(values)))
    return seeds, losses


def stored(folder: Path) -> list[Any]:
    """All episodes of the buffer, in order."""
    with ReplayBuffer(folder / "replay.sqlite", read_only=True) as buffer:
        return list(buffer.iter_episodes())


def faults_after_kill(folder: Path, committed: list[int]) -> Counter[str]:
    """What a kill has harmed; ``committed`` are the episodes of the life that it ended."""
    found: Counter[str] = Counter()
    for path in folder.glob("checkpoints/*.ckpt*"):
        if path.suffix != ".part":
            try:
                checkpoint.read_checkpoint(path)
            except ValueError:
                found["broken checkpoints"] += 1
    if not (folder / "replay.sqlite").is_file():
        return found
    with ReplayBuffer(folder / "replay.sqlite", read_only=True) as buffer:
        found["unsound buffers"] += bool(buffer.problems())
        seeds = buffer.seeds()
    found["doubled episodes"] += len(seeds) - len(set(seeds))
    found["lost episodes"] += len(set(committed) - set(seeds))
    return found


def choose_kill(rng: random.Random, number: int, seconds: float) -> Kill:
    """The next kill: by time for even numbers, else by a line of a phase, all in turn."""
    if number % 2 == 0:
        return Kill(seconds=rng.uniform(0.0, 1.1 * seconds))
    return Kill(phase=PHASES[1 + number // 2 % 6], line=int(10 ** rng.uniform(0, 3)))


def run(kills: int, seed: int, minutes: float, work: Path) -> tuple[Counter[str], Counter[str]]:
    """Kill until ``kills`` or ``minutes`` are reached; faults found, and kills by phase."""
    model = make_model(work / "model")
    whole = work / "whole"
    whole.mkdir()
    _, _, seconds = live(whole, model, Kill())
    right, episodes = dict(read_told(whole)[1]), stored(whole)
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    lives = 0
    while phases.total() < kills and time.monotonic() < end:
        folder = work / f"run{lives}"
        folder.mkdir()
        while True:
            spare = phases.total() < kills and time.monotonic() < end
            kill = choose_kill(rng, phases.total(), seconds) if spare else Kill()
            before = len(read_told(folder)[0])
            killed, phase, _ = live(folder, model, kill)
            lives += 1
            if not killed:
                break
            phases[phase] += 1
            found += faults_after_kill(folder, read_told(folder)[0][before:])
        found["runs ended"] += 1
        losses = read_told(folder)[1]
        found["steps compared"] += len(losses)
        found["different losses"] += sum(right[step] != values for step, values in losses)
        found["different episodes"] += stored(folder) != episodes
        shutil.rmtree(folder)
        print(f"{phases.total()} kills, faults: {dict(+found) or 'none'}", flush=True)
    return found, phases


def main() -> None:
    """Print the table; write the rows with ``--json``; status 1 if anything was harmed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop killing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as work:
        found, phases = run(options.kills, options.seed, options.minutes, Path(work))
    rows = [{"name": f"kills in {p}", "value": phases[p], "unit": "kills"} for p in PHASES]
    names = ("broken checkpoints", "unsound buffers", "lost episodes", "doubled episodes")
    names += ("different losses", "different episodes")
    rows = [
        {"name": "kills", "value": phases.total(), "unit": "kills"},
        *rows,
        *(
            {"name": n, "value": found[n], "unit": n.split()[1]}
            for n in ("runs ended", "steps compared")
        ),
        *({"name": n, "value": found[n], "unit": "faults"} for n in names),
    ]
    for row in rows:
        print(f"{row['name']:<22}{row['value']:>8}")
    if options.json:
        settings = {"seed": options.seed, "steps": STEPS}
        written = [{**row, "settings": settings} for row in rows]
        options.json.write_text(json.dumps({"rows": written}, indent=2) + "\n")
    sys.exit(any(found[name] for name in names))


if __name__ == "__main__":
    main()
