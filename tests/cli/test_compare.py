"""``nlac compare`` on a tiny model: stopped, continued, with an algorithm that fails."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nlac_lightning.compare import for_run, plan, resolve
from nlac_lightning.configs_path import find_config, packaged_configs
from nlac_lightning.errors import ConfigError

pytestmark = pytest.mark.timeout(1800)

HELD_OUT = """callbacks:
    - class_path: nlac_lightning.callbacks.HeldOutEvaluation
      init_args: {split: test, tasks: 2}
"""
BROKEN = "data: {env: {init_args: {level: 9}}}\n"


def state(folder: Path) -> str:
    path = folder / "state.json"
    return json.loads(path.read_text())["state"] if path.exists() else "none"


def test_stopped_and_continued_with_a_failing_algorithm(
    commands: Callable[..., Any], start: Callable[..., Any], config: str, tmp_path: Path
) -> None:
    text = Path(config).read_text("utf-8").replace("callbacks:\n", HELD_OUT, 1)
    (tmp_path / "task.yaml").write_text(text, "utf-8")
    (tmp_path / "broken.yaml").write_text(BROKEN, "utf-8")
    words = ["compare", "--config", "task.yaml", "--algorithms", "broken.yaml,nlac", "--seeds", "3"]
    words += ["--out", "all", "--trainer.max_steps", "40"]  # too long to be over before Ctrl-C
    run = tmp_path / "all/nlac/seed_3"
    process = start(tmp_path, words)
    while not (run / "periodic/step2.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate()
    assert process.returncode == 130, output
    assert state(run) == "interrupted" and state(tmp_path / "all/broken/seed_3") == "failed"
    log = (run / "fit.log").read_text()
    assert "continue with --ckpt_path" in log and "Restored all states" not in log

    again, other = commands([(tmp_path, words), (tmp_path, [*words, "--data.batch_size", "4"])])
    assert again.code == 1, "one algorithm failed"
    assert "Traceback" not in again.err
    assert "broken, seed 3: failed" in again.out
    assert state(run) == "finished"
    assert "Restored all states" in (run / "fit.log").read_text()
    (row,) = json.loads((tmp_path / "all/results.json").read_text())["rows"]
    assert row["name"] == "nlac/seed_3" and row["settings"]["steps"] == 40
    assert row["settings"]["measured"] == "test/trained/success"
    assert row["settings"]["base"] is not None and row["settings"]["episodes"] > 10
    assert [line.split()[0] for line in again.out.splitlines() if line.startswith(("base", "nla"))]
    assert (tmp_path / "all/curves.png").stat().st_size > 10_000
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["seed_everything"] == settings["data"]["seed"] == 3
    assert not (tmp_path / "run").exists(), "all is written in the run's own folder"
    other.refusal("--out", "other settings")


TEXT = "see runs/a/x, my/runs/a/x"


def resolved() -> dict[str, Any]:
    callback = {"class_path": "x.RolloutCallback", "init_args": {"episodes": 2, "seed": 0}}
    saver = {"class_path": "x.ModelCheckpoint", "init_args": {"dirpath": "runs/a/best"}}
    logger = {"class_path": "x.TensorBoardLogger", "init_args": {"save_dir": "runs/a"}}
    return {
        "seed_everything": 0,
        "model": {"class_path": "M", "init_args": {"seed": 0, "evaluation": {"seed": 1000}}},
        "data": {"env": {"class_path": "E", "init_args": {"seed": 5}}, "seed": 0, "buffer": None},
        "trainer": {
            "default_root_dir": "runs/a",
            "logger": logger,
            "callbacks": [callback, saver, {"class_path": "C", "init_args": {"text": [TEXT]}}],
        },
    }  # fmt: skip


def test_all_make_the_same_number_of_gradient_steps(config: str, tmp_path: Path) -> None:
    (tmp_path / "longer.yaml").write_text("trainer: {max_steps: 7}\n", "utf-8")
    names = [Path(name).stem for name in packaged_configs() if name.startswith("algorithm/")]
    runs = plan(["--config", config], names, [0], tmp_path / "out")
    assert len(runs) >= 8 and {run.config["trainer"]["max_steps"] for run in runs} == {6}
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: .*rft 6, longer 7"):
        plan(["--config", config], ["rft", str(tmp_path / "longer.yaml")], [0], tmp_path / "out")


def test_a_run_has_its_own_seed_and_folder() -> None:
    config = for_run(resolved(), Path("out/m/seed_7"), 7)
    assert config["seed_everything"] == config["data"]["seed"] == 7
    assert config["model"]["init_args"] == {"seed": 7, "evaluation": {"seed": 1000}}
    assert config["data"]["env"]["init_args"]["seed"] == 5, "the tasks stay the same"
    rollout, saver, other = config["trainer"]["callbacks"]
    assert rollout["init_args"]["seed"] == 7
    assert saver["init_args"]["dirpath"] == "out/m/seed_7/best"
    assert other["init_args"]["text"] == ["see out/m/seed_7/x, my/runs/a/x"]
    assert config["trainer"]["default_root_dir"] == "out/m/seed_7"
    logger = config["trainer"]["logger"]["init_args"]
    assert logger == {"save_dir": "out/m/seed_7", "version": 0}


@pytest.mark.parametrize("field", ["buffer", "dirpath", "save_dir", "default_root_dir"])
def test_runs_that_would_meet_are_refused(field: str) -> None:
    config = resolved()
    if field == "buffer":
        config["data"]["buffer"] = "elsewhere.sqlite"
    elif field == "dirpath":
        config["trainer"]["callbacks"][1]["init_args"]["dirpath"] = "elsewhere"
    elif field == "save_dir":
        config["trainer"]["logger"]["init_args"]["save_dir"] = "elsewhere"
    else:
        config["trainer"]["default_root_dir"] = None
    with pytest.raises(ConfigError, match=field):
        for_run(config, Path("out/m/seed_7"), 7)


OVERLAYS = [name for name in packaged_configs() if name.startswith("algorithm/")]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_goes_over_a_task_config(config: str, name: str) -> None:
    overlay = yaml.safe_load(find_config(name).read_text("utf-8"))["model"]
    task = yaml.safe_load(Path(config).read_text("utf-8"))["model"]["init_args"]
    model = resolve(["--config", config, "--config", str(find_config(name))])["model"]
    assert model["class_path"] == overlay["class_path"]
    own = overlay.get("init_args", {})
    for key in own.keys() - {"loss", "warmup", "roles", "limits", "evaluation"}:
        made = model["init_args"][key]
        if isinstance(own[key], dict):  # what it leaves out has its default
            assert made.items() >= own[key].items()
        else:
            assert made == own[key]
    assert model["init_args"]["backbone"].items() >= task["backbone"].items()
    assert model["init_args"]["roles"]["format"] == "plain"
