"""A whole run against a server that repeats the key: it is in nothing that is written or said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nlac_lightning import cli

CONFIG = """
model:
  class_path: nlac_lightning.algorithms.react.ReAct
  init_args:
    endpoint: {base_url: URL, api_key_env: DESK_KEY, retries: 1, backoff_seconds: 0.01,
               cache: answers.sqlite, parallel: 1}
    backbone: {name: MODEL}
    roles: {templates: help_desk_small, format: plain, action: plain}
    evaluation: {critic_steps: 0, limits: {max_turns: 2, parallel: 1}}
data:
  env:
    class_path: nlac_lightning.envs.help_desk.HelpDeskEnv
    init_args: {level: 0, n_train: 4, n_val: 4, n_test: 4}
  test_tasks: 2
trainer:
  accelerator: cpu
  default_root_dir: run
  enable_progress_bar: false
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: run, name: logs}
"""

FIT = """
model:
  class_path: nlac_lightning.algorithms.nlac.NLAC
  init_args:
    critic: none
    improvement: accept
    base_action: buffer
    backbone: {name: MODEL, lora_r: 2, target_modules: all-linear}
    roles:
      templates: tau2
      policy: {sampling: {max_new_tokens: 4}}
      successor: {sampling: {max_new_tokens: 4}}
      backup: {sampling: {max_new_tokens: 4}}
data:
  env:
    class_path: nlac_lightning.envs.tau2.Tau2Env
    init_args:
      prompt: slim
      user:
        class_path: nlac_lightning.users.language_model.EndpointUser
        init_args:
          endpoint: {base_url: URL, api_key_env: DESK_KEY, retries: 1, backoff_seconds: 0.01,
                     cache: answers.sqlite, parallel: 1}
  batch_size: 1
trainer:
  max_steps: 1
  limit_val_batches: 0
  accelerator: cpu
  default_root_dir: run
  enable_progress_bar: false
  callbacks:
    - class_path: nlac_lightning.callbacks.RolloutCallback
      init_args: {initial_episodes: 1, limits: {max_turns: 2}}
    - class_path: nlac_lightning.callbacks.InterruptCheckpoint
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {dirpath: run/checkpoints, save_last: true, every_n_train_steps: 1}
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: run, name: logs}
"""


@pytest.mark.parametrize(
    ("command", "config", "written"),
    [("test", CONFIG, "evaluation"), ("fit", FIT, "last.ckpt")],
    ids=["a policy's", "a customer's"],
)
def test_a_key_is_in_nothing_that_a_run_writes(
    command: str,
    config: str,
    written: str,
    faults: Any,
    tiny_llama_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if command == "fit":
        pytest.importorskip("tau2.domains", reason="needs the extra tau")
    secret = "sk-" + os.urandom(8).hex()
    faults.plan = [
        (500, f"no such key: {secret}", {}),
        (500, f"still no such key: {secret}", {}),
        (200, faults.answer(f"find {secret}"), {}),
    ]
    if command == "fit":  # an episode to train on
        del faults.plan[1]
        faults.plan += [(200, faults.answer(f"not {secret}"), {})] * 3
    monkeypatch.setenv("DESK_KEY", secret)
    monkeypatch.chdir(tmp_path)
    text = config.replace("URL", faults.url).replace("MODEL", tiny_llama_path)
    Path("config.yaml").write_text(text, "utf-8")
    cli.main([command, "--config", "config.yaml"])
    assert any(secret in (key or "") for key in faults.keys), "it was sent"
    said = capfd.readouterr()
    if command == "test":
        assert "policy_failed" in said.out + said.err + caplog.text or "react" in said.out
    assert secret not in said.out + said.err + caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4 and any(written in str(path) for path in files)
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
