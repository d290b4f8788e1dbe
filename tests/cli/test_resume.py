"""Stopping and continuing: a run in parts equals one that was never stopped."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.timeout(1800)

LAST = Path("run/checkpoints/last.ckpt")


def _checkpoint(folder: Path, name: Path = LAST) -> dict[str, Any]:
    return torch.load(folder / name, weights_only=True)


def _episodes(folder: Path) -> list[tuple[Any, ...]]:
    """Every stored turn, with the sampled ids."""
    with sqlite3.connect(folder / "run/replay.sqlite") as connection:
        return connection.execute("SELECT * FROM turns ORDER BY episode_id, t").fetchall()


def _assert_equal(folder: Path, other: Path) -> None:
    mine, theirs = _checkpoint(folder), _checkpoint(other)
    assert mine["global_step"] == theirs["global_step"] == 6
    assert set(mine["state_dict"]) == set(theirs["state_dict"])
    for name, value in mine["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][name]), name
    for part in ("lr_schedulers", "ReplayDataModule"):
        assert mine[part] == theirs[part]
    assert mine["nlac"]["versions"] == theirs["nlac"]["versions"]
    assert _episodes(folder) == _episodes(other)


def test_checkpoints_of_an_uninterrupted_run(whole_run: Path) -> None:
    content = _checkpoint(whole_run)
    assert content["global_step"] == 6
    assert content["nlac"]["versions"]["online"] == 6
    # adapters only, and both of them have moved
    assert all("lora_" in name for name in content["state_dict"])
    for adapter in ("online", "target"):
        changed = [v for k, v in content["state_dict"].items() if f"lora_B.{adapter}." in k]
        assert changed and all(value.abs().max() > 0 for value in changed)
    assert (whole_run / LAST).stat().st_size < 2**20
    periodic = {path.name for path in (whole_run / "run/periodic").iterdir()}
    assert periodic == {"step2.ckpt", "step4.ckpt", "step6.ckpt"}
    for step in (2, 4, 6):
        assert _checkpoint(whole_run, Path(f"run/periodic/step{step}.ckpt"))["global_step"] == step
    best = [path.name for path in (whole_run / "run/best").iterdir()]
    assert len(best) == 1


def test_scalars_are_logged_by_gradient_step(whole_run: Path) -> None:
    events = EventAccumulator(str(whole_run / "run/logs/version_0"))
    events.Reload()
    assert {"train/policy", "train/critic", "val/success", "rollout/success"} <= set(
        events.Tags()["scalars"]
    )
    assert len(events.Scalars("train/policy")) == 6


def test_three_and_three_steps_equal_six(
    commands: Callable[..., Any], config: str, whole_run: Path, tmp_path: Path
) -> None:
    fit = ["fit", "--config", config]
    first, second = commands(
        [
            (tmp_path, [*fit, "--trainer.max_steps", "3"]),
            (tmp_path, [*fit, "--ckpt_path", "last"]),
        ]
    )
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    assert "Restored all states" in second.err
    _assert_equal(tmp_path, whole_run)


def test_interrupted_and_continued_equals_six(
    commands: Callable[..., Any],
    start: Callable[..., Any],
    config: str,
    whole_run: Path,
    tmp_path: Path,
) -> None:
    run = start(tmp_path, ["fit", "--config", config])
    _wait(lambda: (tmp_path / "run/periodic/step2.ckpt").exists(), run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    assert run.returncode == 1, err
    assert "Traceback" not in err
    assert "continue with --ckpt_path" in err
    assert 2 <= _checkpoint(tmp_path)["global_step"] < 6
    (done,) = commands([(tmp_path, ["fit", "--config", config, "--ckpt_path", "last"])])
    assert done.code == 0, done.err
    _assert_equal(tmp_path, whole_run)


def test_interrupted_rollouts_keep_committed_episodes(
    commands: Callable[..., Any], start: Callable[..., Any], config: str, tmp_path: Path
) -> None:
    rollouts = tmp_path / "rollouts.yaml"
    text = Path(config).read_text("utf-8").replace("initial_episodes: 4", "initial_episodes: 2000")
    # one episode at a time, so that they are committed one by one
    rollouts.write_text(text.replace("{max_turns: 3}", "{max_turns: 3, parallel: 1}"), "utf-8")
    run = start(tmp_path, ["fit", "--config", str(rollouts)])
    _wait(lambda: _count(tmp_path) >= 3, run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    assert run.returncode == 1, err
    assert "Traceback" not in err
    assert _checkpoint(tmp_path)["global_step"] == 0
    kept = _episodes(tmp_path)
    assert 3 <= _count(tmp_path) < 2000
    resume = ["fit", "--config", config, "--ckpt_path", "last", "--trainer.max_steps", "1"]
    (done,) = commands([(tmp_path, resume)])
    assert done.code == 0, done.err
    assert _episodes(tmp_path)[: len(kept)] == kept


SLOW = """
import time
from nlac_lightning.algorithms.config import OptimizerConfig
from nlac_lightning.callbacks import EMACallback, InterruptCheckpoint
from nlac_lightning.cli import main

def slow(owner, name, reached):
    inner = getattr(owner, name)

    def wrapped(self, *arguments):
        if reached(*arguments):
            print("there", flush=True)
            time.sleep(SECONDS)
        return inner(self, *arguments)

    setattr(owner, name, wrapped)

WHERE
main()
"""
SAVING = 'slow(InterruptCheckpoint, "_save", lambda *_: True)'
STEPPING = 'slow(OptimizerConfig, "scale", lambda step: step == 3)'
"""The scheduler asks for it after the weights of the third step have moved."""


def _there(run: Any) -> None:
    while "there" not in (line := run.stdout.readline()):
        assert line, run.communicate()


@pytest.mark.parametrize("where", [SAVING, STEPPING], ids=["saving", "stepping"])
def test_a_second_ctrl_c_stops_at_once(
    start: Callable[..., Any], config: str, tmp_path: Path, where: str
) -> None:
    program = SLOW.replace("WHERE", where).replace("SECONDS", "120")
    run = start(tmp_path, ["fit", "--config", config], ["-c", program])
    if where == SAVING:
        _wait(lambda: (tmp_path / "run/periodic/step2.ckpt").exists(), run)
    else:
        _there(run)
    run.send_signal(signal.SIGINT)
    if where == SAVING:
        _there(run)
    else:
        time.sleep(1)  # the first one waits for the end of the step
        assert run.poll() is None
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert run.returncode in (1, 130), err
    assert "Traceback" not in err
    assert "continue with" not in err
    # the one before is whole; the half-made third step is not in it
    assert _checkpoint(tmp_path)["global_step"] in ((2, 3, 4, 5) if where == SAVING else (2,))


def test_a_stop_after_the_last_step_leaves_nothing_of_it_undone(
    start: Callable[..., Any], config: str, whole_run: Path, tmp_path: Path
) -> None:
    where = 'slow(EMACallback, "_update", lambda trainer, _: trainer.global_step == 6)'
    program = SLOW.replace("WHERE", where).replace("SECONDS", "2")
    run = start(tmp_path, ["fit", "--config", config], ["-c", program])
    _there(run)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate()
    assert "continue with --ckpt_path" in err
    _assert_equal(tmp_path, whole_run)


def test_a_scheduler_may_repeat_its_signal(
    start: Callable[..., Any], config: str, tmp_path: Path
) -> None:
    program = SLOW.replace("WHERE", SAVING).replace("SECONDS", "2")
    run = start(tmp_path, ["fit", "--config", config], ["-c", program])
    _wait(lambda: (tmp_path / "run/periodic/step2.ckpt").exists(), run)
    run.send_signal(signal.SIGUSR1)
    _there(run)
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGUSR1)
    _, err = run.communicate()
    assert "continue with --ckpt_path" in err
    assert _checkpoint(tmp_path)["global_step"] >= 2


def test_last_without_a_checkpoint_keeps_the_buffer(
    commands: Callable[..., Any], config: str, run_copy: Path
) -> None:
    for path in (run_copy / "run/checkpoints").iterdir():
        path.unlink()
    before = _episodes(run_copy)
    (done,) = commands([(run_copy, ["fit", "--config", config, "--ckpt_path", "last"])])
    done.refusal("there is no last checkpoint available")
    assert _episodes(run_copy) == before


def test_slurm_requeues_after_the_checkpoint(
    start: Callable[..., Any], config: str, whole_run: Path, tmp_path: Path
) -> None:
    """SLURM is not here: a stand-in for ``scontrol`` notes what it is asked."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho \"$@\" >> '{tmp_path}/asked'\n")
    scontrol.chmod(0o755)
    slurm = {
        "PATH": f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}",
        **{"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"},
        **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        "SLURM_NODELIST": "localhost",
    }
    run = start(tmp_path, ["fit", "--config", config], environment=slurm)
    _wait(lambda: (tmp_path / "run/periodic/step2.ckpt").exists(), run)
    run.send_signal(signal.SIGUSR1)
    _, err = run.communicate()
    assert "SIGUSR1: stopping with a checkpoint" in err
    assert (tmp_path / "asked").read_text() == "requeue 42\n", err
    # the job starts again with the very same command
    run = start(tmp_path, ["fit", "--config", config], environment=slurm)
    _, err = run.communicate()
    assert run.returncode == 0, err
    _assert_equal(tmp_path, whole_run)


def _count(folder: Path) -> int:
    path = folder / "run/replay.sqlite"
    if not path.exists():
        return 0
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        try:
            return connection.execute("SELECT count(*) FROM episodes").fetchone()[0]
        except sqlite3.OperationalError:  # not yet set up
            return 0


def _wait(ready: Callable[[], bool], run: Any) -> None:
    while not ready():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
