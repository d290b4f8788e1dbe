"""``configs/algorithm/*.yaml`` over the quickstart: the algorithm changes, the task stays."""

from pathlib import Path

import pytest
import yaml

from nlac_lightning.algorithms.grpo import GRPO
from nlac_lightning.algorithms.ppo import PPO
from nlac_lightning.algorithms.rft import RFT
from nlac_lightning.configs_path import find_config
from nlac_lightning.lightning_cli import NLACCommandLine


@pytest.mark.parametrize(("name", "algorithm"), [("rft", RFT), ("ppo", PPO), ("grpo", GRPO)])
def test_overlay_keeps_the_task(
    name: str, algorithm: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(find_config(c)) for c in ("quickstart", f"algorithm/{name}")]
    made = NLACCommandLine.run_from(["--config", files[0], "--config", files[1]], run=False)
    module = made.model
    assert type(module) is algorithm
    assert module.roles_config.templates == "help_desk_small"
    assert module.backbone_config.lora_r == 16
    task = yaml.safe_load(Path(files[0]).read_text("utf-8"))
    optimizer = task["model"]["init_args"]["optimizer"]
    assert module.optimizer_config.decay_steps == optimizer["decay_steps"]
    assert made.datamodule.env.name == "help_desk/0"
    assert made.trainer.max_steps == task["trainer"]["max_steps"]
