"""Runs of the real command in folders of their own, with a tiny model and few steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from nlac_lightning.roles.templates import FAMILIES

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

CONFIG = """
seed_everything: 0
model:
  class_path: nlac_lightning.algorithms.nlac.NLAC
  init_args:
    # without a critic every stored action is distilled, so that each step changes the adapter
    improvement: accept
    base_action: buffer
    critic: none
    loss: {policy_kl: 0.1}
    backbone: {name: MODEL, lora_r: 4, lora_dropout: 0.1, dtype: float32}
    optimizer: {lr: 1.0e-2, warmup_steps: 2}
    roles:
      templates: help_desk_small
      format: plain
      action: plain
      # a random model hardly ever ends a line
      policy: {sampling: {temperature: 1.0, max_new_tokens: 4, stop: [e, a, o]}}
      successor: {sampling: {temperature: 1.0, max_new_tokens: 4, stop: [e, a, o]}}
      backup:
        adapter: target
        context: none
        sampling: {temperature: 1.0, max_new_tokens: 4, stop: [e, a, o]}
      evaluator: {adapter: base, context: none, sampling: {max_new_tokens: 4}}
      refinement: {sampling: {max_new_tokens: 4}}
    evaluation: {critic_steps: 2, limits: {max_turns: 2}}
data:
  env:
    class_path: nlac_lightning.envs.help_desk.HelpDeskEnv
    init_args: {level: 0, n_train: 16, n_val: 4, n_test: 4}
  batch_size: 3
  val_tasks: 2
  test_tasks: 2
trainer:
  max_steps: 6
  accelerator: cpu
  devices: 1
  default_root_dir: run
  enable_model_summary: false
  enable_progress_bar: false
  log_every_n_steps: 1
  check_val_every_n_epoch: null
  val_check_interval: 2
  num_sanity_val_steps: 0
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: run, name: logs}
  callbacks:
    - class_path: nlac_lightning.callbacks.RolloutCallback
      init_args:
        initial_episodes: 4
        episodes: 2
        every_n_steps: 2
        initial_exploration: {kind: epsilon, epsilon: 0.6}
        exploration: {kind: epsilon, epsilon: 0.6}
        limits: {max_turns: 3}
    - class_path: nlac_lightning.callbacks.EMACallback
      init_args: {tau: 0.1}
    - class_path: nlac_lightning.callbacks.InterruptCheckpoint
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: run/checkpoints
        save_last: true
        save_top_k: 0
        every_n_train_steps: 1
        enable_version_counter: false
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: run/periodic
        filename: step{step}
        auto_insert_metric_name: false
        save_top_k: -1
        every_n_train_steps: 2
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: run/best
        filename: step{step}
        auto_insert_metric_name: false
        monitor: val/success
        mode: max
"""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refusal(self, *words: str) -> None:
        """The command must have failed, without a traceback, in a message with these words."""
        assert self.code in (1, 2), self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err


Commands = Callable[[list[tuple[Path, list[str]]]], list[Result]]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def commands() -> Commands:
    """Run commands one after the other, given as folder and arguments."""

    def run(jobs: list[tuple[Path, list[str]]]) -> list[Result]:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("run_commands.py"))],
            input=json.dumps([(str(folder), arguments) for folder, arguments in jobs]),
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr
        return [Result(**result) for result in json.loads(done.stdout)]

    return run


@pytest.fixture(scope="session")
def start() -> Start:
    """Start ``python -m nlac_lightning.cli``, or another program, in a folder."""

    def popen(
        folder: Path,
        arguments: list[str],
        program: Sequence[str] = ("-m", "nlac_lightning.cli"),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **environment},
            # a shell that runs the tests in the background has Ctrl-C ignored, which is inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return popen


@pytest.fixture(scope="session")
def config(tiny_llama_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a config that trains a tiny model for six steps below the current folder."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG.replace("MODEL", tiny_llama_path), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def whole_run(config: str, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of six steps through the real entry point. Copy it to change it."""
    folder = tmp_path_factory.mktemp("whole")
    done = start(folder, ["fit", "--config", config])
    _, err = done.communicate()
    assert done.returncode == 0, err
    assert "Traceback" not in err
    return folder


@pytest.fixture
def run_copy(whole_run: Path, tmp_path: Path) -> Path:
    """A copy of :func:`whole_run` to work in."""
    return Path(shutil.copytree(whole_run, tmp_path / "copy"))


@pytest.fixture(scope="session")
def bad_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose successor names an unknown field in its second line."""
    folder = Path(shutil.copytree(FAMILIES / "help_desk_small", tmp_path_factory.mktemp("t") / "x"))
    (folder / "successor.jinja").write_text("If {{ action }}\nthen {{ futur }}:\n", "utf-8")
    return folder
