"""Recorded runs of the original tau-bench: rewards, the buffer, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning.cli import main
from nlac_lightning.envs.base import Task
from nlac_lightning.envs.tau2.recorded import (
    RecordedEnv,
    RecordedSession,
    RecordedUser,
    episodes,
    read_runs,
)
from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import Roles
from nlac_lightning.users.base import UserTask


class Watched(RecordedEnv):
    """Keeps the sessions that it starts."""

    def reset(self, task: Task, seed: int = 0) -> RecordedSession:
        self.sessions = getattr(self, "sessions", {})
        self.sessions[task.id] = super().reset(task, seed)
        return self.sessions[task.id]


def test_replayed_runs_earn_what_was_recorded_and_what_tau2_gives(
    airline: Any, roles: Roles, tau2_reward: Any, every: int, runs_file: Path
) -> None:
    runs = read_runs(runs_file, airline)
    assert len(runs) == 200
    recorded = Watched(airline, runs[::every])
    played = list(episodes(recorded, roles))
    assert len(played) == len(recorded.runs)
    for episode in played:
        last = episode.turns[-1]
        reward = tau2_reward(recorded.sessions[episode.task_id]) if last.terminated else 0.0
        assert episode.total_reward == reward == last.info["recorded_reward"], episode.task_id
    assert {episode.total_reward for episode in played} == {0.0, 1.0}


def test_a_user_who_has_no_more_to_say_fails() -> None:
    session = RecordedUser(["Hi"]).start(UserTask("1", "", "", "", ""), 0)
    assert session.open().text == "Hi"
    assert session.reply("Hello.").failed


CONFIG = """
model:
  class_path: nlac_lightning.algorithms.nlac.NLAC
  init_args:
    backbone: {name: MODEL, lora_r: 4, dtype: float32}
    roles:
      templates: tau2
      policy: {sampling: {max_new_tokens: 2}}
      successor: {sampling: {max_new_tokens: 2}}
      backup: {adapter: target, sampling: {max_new_tokens: 2}}
      evaluator: {sampling: {max_new_tokens: 2}}
      refinement: {sampling: {max_new_tokens: 2}}
    evaluation: {critic_steps: 1, trials: 2, limits: {max_turns: 1}}
data:
  env:
    class_path: nlac_lightning.envs.tau2.Tau2Env
    init_args:
      domain: airline
      prompt: slim
      max_result_chars: 300
      user:
        class_path: nlac_lightning.envs.tau2.recorded.RecordedUser
        init_args: {turns: [Hello., "Bye. ###STOP###"]}
  batch_size: 2
  test_tasks: 2
trainer:
  max_steps: 1
  accelerator: cpu
  devices: 1
  default_root_dir: run
  enable_model_summary: false
  enable_progress_bar: false
  check_val_every_n_epoch: null
  limit_val_batches: 0
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: run, name: logs}
  callbacks:
    - class_path: nlac_lightning.callbacks.HeldOutEvaluation
      init_args: {split: test, tasks: 2}
    - class_path: nlac_lightning.callbacks.RolloutCallback
      init_args: {initial_episodes: 0, episodes: 0}
    - class_path: nlac_lightning.callbacks.EMACallback
"""


def test_recorded_runs_train_without_a_rollout(
    tmp_path: Path,
    tiny_llama_path: str,
    runs_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG.replace("MODEL", tiny_llama_path))
    with gzip.open(runs_file) as source:
        few = json.load(source)[:4]
    few[0]["traj"] = few[0]["traj"][:-1]  # the user has not ended this one
    Path("few.json").write_text(json.dumps(few))
    Path("overlay.yaml").write_text("data: {batch_size: 2}\n")
    # configs and options are those of nlac fit
    how = ["--config", "c.yaml", "--config", "overlay.yaml", "--data.env.init_args.n_val", "3"]
    main(["replay", "import", "--format", "tau-bench", "few.json", *how])
    assert "4 runs added to run/replay.sqlite" in capsys.readouterr().out
    with ReplayBuffer("run/replay.sqlite", read_only=True) as buffer:
        assert buffer.problems() == []
        held = list(buffer.iter_episodes())
        assert [e.env for e in held] == ["tau2/airline"] * 4
        assert any(e.reason == "recording_ends" for e in held)
    main(["fit", "--config", "c.yaml"])
    with ReplayBuffer("run/replay.sqlite", read_only=True) as buffer:
        assert buffer.high_water_mark == 4  # not one episode was added
    (folder,) = Path("run/logs").glob("*/evaluation")
    table = (folder / "table.txt").read_text()
    assert "tau2/airline, test" in table and "pass^2" in table and "user failures" in table
    found = json.loads((folder / "breakdown.json").read_text())["policies"]
    assert set(found) == {"base", "trained"} and found["base"]["groups"]["all tasks"]["tasks"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot be read"),
        (b'{"a": 1}', "not a list"),
        (b'[{"task_id": 1}]', "entry 0 is not a recorded run"),
        (b"\x1f\x8bno gzip", "cannot be read"),
    ],
)
def test_other_files_are_refused(airline: Any, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "runs.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_runs(tmp_path / "runs.json", airline)
