"""``nlac compare``: several algorithms on one task with several seeds, one run after the other.

Each run is a process of its own, ``nlac fit --config OUT/ALGORITHM/seed_N/config.yaml``: the task's
config under the algorithm's overlay, resolved, with all seeds set to N and everything that lay
below ``trainer.default_root_dir`` moved into the run's folder.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nlac_lightning.configs_path import find_config
from nlac_lightning.errors import ConfigError
from nlac_lightning.report.compare import RunResult, comparison, read_run, rows_json
from nlac_lightning.report.curves import EVENT_FILES, plot_runs

Config = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of the comparison.

    Attributes:
        folder: where it keeps all it writes: ``config.yaml``, ``state.json`` and ``fit.log`` too.
        config: its resolved settings.
    """

    algorithm: str
    seed: int
    folder: Path
    config: Config

    @property
    def state(self) -> str:
        """``waiting``, ``finished``, ``failed`` or ``interrupted``."""
        path = self.folder / "state.json"
        return json.loads(path.read_text("utf-8"))["state"] if path.is_file() else "waiting"

    def record(self, state: str) -> None:
        """Remember how the run stands."""
        (self.folder / "state.json").write_text(json.dumps({"state": state}), "utf-8")

    def write_config(self) -> None:
        """Write the settings, or check that they are those of the run that is to be continued."""
        path = self.folder / "config.yaml"
        text = yaml.safe_dump(self.config, sort_keys=False)
        if path.is_file() and path.read_text("utf-8") != text:
            raise ConfigError(
                "--out", f"{self.folder} holds a run with other settings", "name another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def compare(
    arguments: Sequence[str], algorithms: Sequence[str], seeds: Sequence[int], out: Path
) -> list[RunResult]:
    """Run every algorithm with every seed, unless it has finished already; report after each.

    Writes ``table.txt``, ``results.json`` and ``curves.png`` in ``out``. A run that was stopped
    goes on from its newest checkpoint, one that fails does not keep the others from running.

    Args:
        arguments: of ``nlac fit``, for all runs: ``--config`` of the task, and changes.
        algorithms: names of ``configs/algorithm/NAME.yaml``, or files.
        seeds: one run of each algorithm for each.
        out: the comparison's folder; the same one continues it.

    Raises:
        ConfigError: a wrong setting, found before anything runs.
    """
    runs = plan(arguments, algorithms, seeds, out)
    for run in runs:
        run.write_config()
    for number, run in enumerate(runs, 1):
        label = f"[{number}/{len(runs)}] {run.algorithm}, seed {run.seed}"
        if run.state == "finished":
            print(f"{label}: finished before", flush=True)
            continue
        began = time.monotonic()
        print(f"{label}: runs, see {run.folder / 'fit.log'}", flush=True)
        code, stopped = _fit(run)
        run.record("finished" if code == 0 else "interrupted" if stopped else "failed")
        print(f"{label}: {run.state} after {time.monotonic() - began:.0f} s", flush=True)
        report(runs, out)
        if stopped:
            raise KeyboardInterrupt
    return report(runs, out)


def plan(
    arguments: Sequence[str], algorithms: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Run]:
    """All runs, the first seed of all algorithms first."""
    resolved = {}
    for name in algorithms:
        overlay = find_config(name if name.endswith(".yaml") else f"algorithm/{name}")
        resolved[Path(name).stem] = resolve([*arguments, "--config", str(overlay)])
    steps = {name: config["trainer"]["max_steps"] for name, config in resolved.items()}
    if len(set(steps.values())) > 1:
        raise ConfigError(
            "trainer.max_steps",
            "the algorithms would make unequal numbers of gradient steps ("
            + ", ".join(f"{name} {n}" for name, n in steps.items())
            + ")",
            "leave it to the task's config or the command line",
        )
    return [
        Run(name, seed, folder := out / name / f"seed_{seed}", for_run(config, folder, seed))
        for seed in seeds
        for name, config in resolved.items()
    ]


def resolve(arguments: Sequence[str]) -> Config:
    """All settings of ``nlac fit`` with these arguments."""
    from nlac_lightning.cli import run_trainer

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            run_trainer(["fit", *_changes_last(arguments), "--print_config"])
        except SystemExit as end:
            if end.code:
                raise
    return yaml.safe_load(printed.getvalue())


def _changes_last(arguments: Sequence[str]) -> list[str]:
    """Configs before single settings, so that an overlay does not undo these."""
    configs, others = [], []
    words = iter(arguments)
    for word in words:
        if word in ("--config", "-c"):
            configs += [word, next(words, "")]
        elif word.startswith(("--config=", "-c=")):
            configs.append(word)
        else:
            others.append(word)
    return configs + others


def for_run(config: Config, folder: Path, seed: int) -> Config:
    """The settings of one run: its seed everywhere but in the environment, its own folder.

    Raises:
        ConfigError: something would be written outside of the folder, where runs would meet.
    """
    trainer = config["trainer"]
    root = trainer.get("default_root_dir")
    if not root:
        raise ConfigError(
            "trainer.default_root_dir", "without it runs share a folder", "set it in the config"
        )
    moved = _moved(copy.deepcopy(config), str(root).rstrip("/"), str(folder))
    moved["seed_everything"] = seed
    trainer = moved["trainer"]
    loggers = trainer.get("logger")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    callbacks = trainer.get("callbacks") or []
    for part in (moved["model"], moved["data"], *callbacks):
        settings = part.get("init_args", part)
        if "seed" in settings:
            settings["seed"] = seed
    for logger in (logger for logger in loggers if isinstance(logger, dict)):
        if logger["class_path"].endswith("TensorBoardLogger"):
            logger["init_args"]["version"] = 0  # a continued run keeps to its event files' folder
    for field, path in _outputs(moved, loggers, callbacks):
        if not Path(path).is_relative_to(folder):
            raise ConfigError(
                field, f"'{path}' would be shared by all runs", f"put it below {root}"
            )
    return moved


def _outputs(config: Config, loggers: list[Any], callbacks: list[Config]) -> Iterator[Any]:
    """Settings that name a place to write to."""
    data = config["data"].get("init_args", config["data"])
    plays = any(c.get("init_args", {}).get("episodes") for c in callbacks)
    found = [("data.buffer", data.get("buffer") if plays else None)]
    for kind, parts, name in (("logger", loggers, "save_dir"), ("callbacks", callbacks, "dirpath")):
        for part in parts:
            if isinstance(part, dict):
                found.append((f"trainer.{kind}.{name}", part.get("init_args", {}).get(name)))
    return ((field, path) for field, path in found if path)


def _moved(value: Any, root: str, folder: str) -> Any:
    """Every path below ``root`` in a setting, also inside of a text, is one below ``folder``."""
    if isinstance(value, dict):
        return {key: _moved(item, root, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, root, folder) for item in value]
    if not isinstance(value, str):
        return value
    if value.rstrip("/") == root:
        return folder
    return re.sub(rf"(?<![\w./-]){re.escape(root)}(?=/)", lambda _: folder, value)


def _fit(run: Run) -> tuple[int, bool]:
    """Exit status of the run's process, and whether Ctrl-C stopped it; it may end its step."""
    command = [sys.executable, "-m", "nlac_lightning.cli", "fit"]
    command += ["--config", str(run.folder / "config.yaml")]
    checkpoints = sorted(run.folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        command += ["--ckpt_path", str(checkpoints[-1])]
    stopped = False
    with (run.folder / "fit.log").open("a", encoding="utf-8") as log:
        # In a session of its own, each Ctrl-C reaches it once, from here.
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        while True:
            try:
                return child.wait(), stopped
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                stopped = True


def report(runs: Sequence[Run], out: Path) -> list[RunResult]:
    """Write table, rows and figure of what the runs have reached so far."""
    results = [read_run(run.folder, run.algorithm, run.seed, run.state) for run in runs]
    (out / "table.txt").write_text(comparison(results) + "\n", "utf-8")
    (out / "results.json").write_text(rows_json(results), "utf-8")
    if any(result.measured for result in results):
        started = [run.folder for run in runs if any(run.folder.rglob(EVENT_FILES))]
        plot_runs(started, out / "curves.png")
    return results
