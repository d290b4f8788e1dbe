"""The configs of tasks: each makes its objects, and the path of the user's own command runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from nlac_lightning.cli import main
from nlac_lightning.configs_path import CONFIGS
from nlac_lightning.errors import ConfigError
from nlac_lightning.lightning_cli import NLACCommandLine

EXTRAS = {
    "tau": ("tau2", "tau"),
    "math": ("math_verify", "math"),
    "gymnasium": ("textarena", "gym"),
    "miniwob": ("browsergym", "web"),
}
"""Start of a config's name: the package that it needs, and the extra that brings it."""
TASKS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "tau_offline")


def need_extra(name: str) -> None:
    for start, (package, extra) in EXTRAS.items():
        if name.startswith(start) and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the extra {extra}")
    if name.startswith("miniwob"):
        from nlac_lightning.envs.miniwob import find_chromium

        try:
            find_chromium()
        except ConfigError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("name", TASKS)
def test_each_config_makes_its_objects_and_says_how_it_is_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_extra(name)
    monkeypatch.chdir(tmp_path)
    Path("things.csv").write_text("word\n" + "\n".join(f"thing {i}" for i in range(1700)))
    rows = [{"problem": str(i), "level": "Level 1", "solution": r"\boxed{1}"} for i in range(1200)]
    for part in ("train", "test"):
        Path(f"{part}.jsonl").write_text("\n".join(json.dumps(r | {"p": part}) for r in rows))
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    assert first.startswith("# nlac ") and f"configs/{name}.yaml" in first
    assert rest.startswith("# Needs: ")
    options = ["--config", str(CONFIGS / f"{name}.yaml")]
    if name == "tau_retail" and not torch.cuda.is_available():  # FSDP over GPUs
        with pytest.raises(ConfigError, match=r"trainer\.accelerator.*qlora"):
            NLACCommandLine.run_from(options, run=False)
        options += ["--config", str(CONFIGS / "strategy" / "qlora.yaml")]
    made = NLACCommandLine.run_from(options, run=False)
    assert made.datamodule.env.tasks("train") and made.datamodule.env.tasks("test")


def test_customer_service_from_training_to_zero_shot_transfer(
    tmp_path: Path,
    tiny_llama_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The CPU config, whole but for its model: train on retail, test on airline."""
    need_extra("tau")
    monkeypatch.chdir(tmp_path)
    common = ["--config", "tau_retail_cpu", "--model.init_args.backbone.name", tiny_llama_path]
    main(["fit", *common])
    (folder,) = Path("runs/tau_retail_cpu/logs").glob("*/evaluation")
    table = (folder / "table.txt").read_text()
    for line in ("tau2/retail, test", "mean turns", "tool errors", "user failures"):
        assert line in table
    found = json.loads((folder / "breakdown.json").read_text())["policies"]
    assert set(found) == {"base", "trained"} and (folder / "trained.html").is_file()
    capsys.readouterr()
    checkpoint = "runs/tau_retail_cpu/checkpoints/last.ckpt"
    airline = ["--data.env.init_args.domain", "airline", "--data.test_tasks", "2"]
    main(["test", *common, *airline, "--ckpt_path", checkpoint])
    said = capsys.readouterr().out
    assert "tau2/airline, test" in said and "untrained" not in said
