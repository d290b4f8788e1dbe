"""Kills and stops a training run at random moments, and looks at what is left.

    python benchmarks/faults.py --kills 100 --signals 50 --texts 10000

A tiny run (see tiny_run.py) is killed, checked, and continued with the last checkpoint, until it
ends; then the next one starts. Every second kill comes at a random time, the others at a random
line of Python inside one phase (rollout, targets, backward, checkpoint, buffer, ema). After each
kill every checkpoint must be whole, the buffer sound, and no committed episode lost or doubled;
each step made again must have the losses of the run that was never killed, bit for bit, and the
run that ends the same adapters and episodes. The same then with SIGINT, SIGTERM and SIGUSR1, which
must end in a checkpoint within 10 s. ``--texts`` runs the properties of tests/test_hostile_text.py
with so many examples each.
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
import struct
import subprocess
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
STOPPED = 7
"""Exit status of a life that a stop signal ended."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LAST = Path("checkpoints", "last.ckpt")


@dataclass
class Kill:
    """Where a run gets a signal: after ``seconds``, or at a line inside a phase."""

    seconds: float | None = None
    phase: str = ""
    line: int = 0
    number: int = signal.SIGKILL


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
    """Marks the phase that the run is in, and sends it the signal at the line asked for."""

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
        if self.lines < 0 and self.kill.phase:
            self.kill.phase = ""
            self.shared[1] = self.shared[0]  # a stop leaves the phase before the run ends
            self.shared[8:16] = struct.pack("d", time.monotonic())
            os.kill(os.getpid(), self.kill.number)
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
    """Run one life.

    Returns whether a signal ended it, in which phase, and how many seconds it took: the stop where
    there is one to time, else the life.
    """
    with mmap.mmap(-1, 16) as shared:
        began = time.monotonic()
        child = os.fork()
        if not child:
            code = 0
            try:
                os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                train(folder, model, shared, kill)
            except SystemExit:  # how Lightning leaves after a stop signal
                code = STOPPED
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
        if code > 0 and code != STOPPED:
            said = (folder / "output").read_text("utf-8", "replace")
            raise SystemExit(f"the run itself failed:\n{said[-4000:]}")
        sent = struct.unpack("d", shared[8:16])[0]
        return code != 0, PHASES[shared[1 if sent else 0]], time.monotonic() - (sent or began)


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


def choose(rng: random.Random, number: int, seconds: float, stops: bool) -> Kill:
    """The next signal. Kills come by time for even numbers, all others at a line of a phase."""
    if number % 2 == 0 and not stops:
        return Kill(seconds=rng.uniform(0.0, 1.1 * seconds))
    turn = number if stops else number // 2
    kill = Kill(phase=PHASES[1 + turn % 6], line=int(10 ** rng.uniform(0, 3.5)))
    if stops:
        kill.number = STOPS[number % 3]
    return kill


def weights(folder: Path) -> dict[str, Any]:
    """The adapters of the last checkpoint, as plain numbers."""
    state = checkpoint.read_checkpoint(folder / LAST)["state_dict"]
    return {name: value.tolist() for name, value in state.items()}


def run(
    count: int, stops: bool, seed: int, minutes: float, work: Path
) -> tuple[Counter[str], Counter[str]]:
    """Send signals until ``count`` or ``minutes`` are reached; faults, and signals by phase."""
    model = make_model(work / "model")
    whole = work / f"whole_{stops}"
    whole.mkdir()
    _, _, seconds = live(whole, model, Kill())
    right, episodes, adapters = dict(read_told(whole)[1]), stored(whole), weights(whole)
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    while phases.total() < count and time.monotonic() < end:
        folder = work / f"run_{phases.total()}"
        folder.mkdir()
        ended = False
        while not ended:
            spare = phases.total() < count and time.monotonic() < end
            kill = choose(rng, phases.total(), seconds, stops) if spare else Kill()
            before = len(read_told(folder)[0])
            killed, phase, took = live(folder, model, kill)
            ended = not killed
            if killed:
                phases[phase] += 1
                committed = read_told(folder)[0][before:]
                # a stop gives back the episodes of an unfinished collection, to play them again
                found += faults_after_kill(folder, [] if stops else committed)
                found["stops that took over 10 s"] += stops and took > 10
                found["stops without a checkpoint"] += stops and not (folder / LAST).is_file()
        losses = read_told(folder)[1]
        found["runs ended"] += 1
        found["steps compared"] += len(losses)
        found["different losses"] += sum(right[step] != values for step, values in losses)
        found["different episodes"] += stored(folder) != episodes
        found["different adapters"] += weights(folder) != adapters
        shutil.rmtree(folder)
        print(f"{phases.total()} signals, faults: {dict(+found) or 'none'}", flush=True)
    return found, phases


FAULTS = (
    "broken checkpoints",
    "unsound buffers",
    "lost episodes",
    "doubled episodes",
    "different losses",
    "different episodes",
    "different adapters",
    "stops that took over 10 s",
    "stops without a checkpoint",
)


def report(kind: str, found: Counter[str], phases: Counter[str]) -> list[dict[str, Any]]:
    """Rows of the table for one kind of signal."""
    rows = [(kind, phases.total(), "signals")]
    rows += [(f"{kind} in {phase}", phases[phase], "signals") for phase in PHASES]
    rows += [("runs ended", found["runs ended"], "runs")]
    rows += [("steps compared", found["steps compared"], "steps")]
    rows += [(name, found[name], "faults") for name in FAULTS]
    return [
        {"name": name, "value": value, "unit": unit, "settings": {"by": kind, "steps": STEPS}}
        for name, value, unit in rows
    ]


def hostile_texts(examples: int) -> list[dict[str, Any]]:
    """Run the properties on so many texts each; rows of the table."""
    tests = Path(__file__).parents[1] / "tests" / "test_hostile_text.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:warnings", "--timeout=0", str(tests)],
        env={**os.environ, "NLAC_EXAMPLES": str(examples)},
        check=False,
    )
    settings = {"by": "hostile texts", "examples": examples}
    failed = int(done.returncode != 0)
    return [
        {"name": "texts, each property", "value": examples, "unit": "texts", "settings": settings},
        {"name": "broken properties", "value": failed, "unit": "faults", "settings": settings},
    ]


def main() -> None:
    """Print the table; write the rows with ``--json``; status 1 if anything was harmed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--signals", type=int, default=50)
    parser.add_argument("--texts", type=int, default=0, help="hostile texts for each property")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of kills, of signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for kind, count in (("kills", options.kills), ("stop signals", options.signals)):
            if count:
                stops = kind == "stop signals"
                given = run(count, stops, options.seed, options.minutes, Path(work))
                rows += report(kind, *given)
    if options.texts:
        rows += hostile_texts(options.texts)
    for row in rows:
        print(f"{row['name']:<28}{row['value']:>8} {row['unit']}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    sys.exit(any(row["unit"] == "faults" and row["value"] for row in rows))


if __name__ == "__main__":
    main()
