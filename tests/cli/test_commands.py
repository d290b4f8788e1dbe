"""Commands on a finished run, and what a config does on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.errors import ConfigError

pytestmark = pytest.mark.timeout(1800)

LAST = "run/checkpoints/last.ckpt"
NLAC = "nlac_lightning.algorithms.nlac.NLAC"


def test_evaluating_a_checkpoint(commands: Callable[..., Any], config: str, run_copy: Path) -> None:
    options = ["--config", config, "--ckpt_path"]
    again = ["fit", "--config", config, "--trainer.max_steps", "1"]
    test, untrained, validate, predict, second = commands(
        [
            (run_copy, ["test", *options, LAST]),
            (run_copy, ["test", "--config", config, "--data.test_tasks", "1"]),
            (run_copy, ["validate", *options, "last"]),
            (run_copy, ["predict", *options, LAST]),
            (run_copy, again),
        ]
    )
    for result in (test, untrained, validate, predict, second):
        assert result.code == 0, result.err
    assert "success [95%]" in test.out
    assert "untrained" not in test.out
    assert "untrained" in untrained.out
    assert "val/success" in validate.out
    folder = run_copy / "run/logs/version_1/evaluation"
    base, trained = (json.loads((folder / f"{p}.json").read_text()) for p in ("base", "trained"))
    tasks = [[episode["task_id"] for episode in run["episodes"]] for run in (base, trained)]
    assert tasks[0] == tasks[1] == ["test-0000", "test-0001"]
    actions = [
        [s["action"] for e in run["episodes"] for s in e["steps"]] for run in (base, trained)
    ]
    assert actions[0] != actions[1]
    assert {"base.html", "trained.txt", "table.txt"} <= {path.name for path in folder.iterdir()}


def test_replay_and_export_from_the_shell(
    commands: Callable[..., Any], run_copy: Path, tiny_llama_path: str
) -> None:
    buffer = "run/replay.sqlite"
    stats, check, out, back, both, export = commands(
        [
            (run_copy, ["replay", "stats", buffer]),
            (run_copy, ["replay", "check", buffer]),
            (run_copy, ["replay", "export", buffer, "episodes.parquet"]),
            (run_copy, ["replay", "import", "new.sqlite", "episodes.parquet"]),
            (run_copy, ["replay", "stats", "new.sqlite"]),
            (run_copy, ["export", LAST, "adapter"]),
        ]
    )
    for result in (stats, check, out, back, both, export):
        assert result.code == 0, result.err
    assert "help_desk/0" in stats.out
    assert "sound" in check.out
    held = [line for line in stats.out.splitlines() if line.startswith("episodes")]
    assert held[0] in both.out.splitlines()
    assert "adapter" in export.out
    _assert_same_logits(run_copy, tiny_llama_path)


def _assert_same_logits(folder: Path, base: str) -> None:
    """PEFT alone computes with the export what the backbone computes with the checkpoint."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        untrained = plain(ids).logits
        alone = PeftModel.from_pretrained(plain, str(folder / "adapter")).eval()(ids).logits
    backbone = Backbone(BackboneConfig(name=base, lora_r=4, dtype="float32")).eval()
    saved = torch.load(folder / LAST, weights_only=True)["state_dict"]
    own = {name.removeprefix("backbone."): value for name, value in saved.items()}
    assert not backbone.load_state_dict(own, strict=False).unexpected_keys
    with torch.no_grad(), backbone.use("online"):
        trained = backbone.model(ids).logits
    torch.testing.assert_close(alone, trained)
    assert (trained - untrained).abs().max() > 1e-3
    for source in (folder / LAST, folder / "adapter"):
        config = BackboneConfig(base, lora_r=4, dtype="float32", init_adapter=str(source))
        begun = Backbone(config).eval()
        for adapter in ("online", "target"):
            with torch.no_grad(), begun.use(adapter):
                torch.testing.assert_close(begun.model(ids).logits, trained)
        for wrong in ({"lora_r": 8}, {"lora_alpha": 8.0}, {"init_adapter": base}):
            with pytest.raises(ConfigError):
                Backbone(replace(config, **wrong))


def test_roles_shows_every_role(commands: Callable[..., Any], config: str, tmp_path: Path) -> None:
    chat = [
        "--model.init_args.roles.templates",
        "default",
        "--model.init_args.roles.format",
        "chat",
    ]
    for result in commands(
        [
            (tmp_path, ["roles", "--config", config]),
            (tmp_path, ["roles", "--config", config, *chat]),
        ]
    ):
        assert result.code == 0, result.err
        for role in ("policy", "successor", "backup", "evaluator", "refinement"):
            assert f"==== {role} =" in result.out
        assert result.out.count("shared with the state") == 5


@pytest.fixture(scope="module")
def printed(
    commands: Callable[..., Any], config: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What ``--print_config`` says after each kind of change."""
    folder = tmp_path_factory.mktemp("print")
    (folder / "overlay.yaml").write_text(
        "data: {batch_size: 7}\ntrainer: {max_steps: 2}\n", "utf-8"
    )
    changes = {
        "plain": [],
        "overlay": ["--config", "overlay.yaml"],
        "short": ["--model.critic", "oracle", "--model.init_args.m", "2"],
        "class": ["--model", NLAC],
        "callback": ["--trainer.callbacks+=nlac_lightning.callbacks.Console"],
    }
    fit = ["fit", "--config", config]
    results = commands([(folder, [*fit, *change, "--print_config"]) for change in changes.values()])
    for result in results:
        assert result.code == 0, result.err
    return {name: yaml.safe_load(r.out) for name, r in zip(changes, results, strict=True)}


def test_a_later_config_overlays_an_earlier_one(printed: dict[str, dict[str, Any]]) -> None:
    plain, overlaid = printed["plain"], printed["overlay"]
    assert (plain["data"]["batch_size"], plain["trainer"]["max_steps"]) == (3, 6)
    assert (overlaid["data"]["batch_size"], overlaid["trainer"]["max_steps"]) == (7, 2)
    assert overlaid["model"] == plain["model"]
    assert overlaid["trainer"]["callbacks"] == plain["trainer"]["callbacks"]


def test_options_change_single_arguments(printed: dict[str, dict[str, Any]]) -> None:
    plain, changed = (printed[name]["model"]["init_args"] for name in ("plain", "short"))
    assert changed == {**plain, "critic": "oracle", "m": 2}


def test_naming_the_class_again_keeps_its_arguments(printed: dict[str, dict[str, Any]]) -> None:
    assert printed["class"]["model"] == printed["plain"]["model"]


def test_a_callback_is_appended(printed: dict[str, dict[str, Any]]) -> None:
    plain, more = (printed[name]["trainer"]["callbacks"] for name in ("plain", "callback"))
    assert more[:-1] == plain
    assert more[-1]["class_path"] == "nlac_lightning.callbacks.Console"
