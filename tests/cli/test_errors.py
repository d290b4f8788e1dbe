"""Wrong settings and files: one clear message, a status that is not 0, and nothing lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(1800)

CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown option": (["--trainer.bogus", "1"], ["bogus"]),
    "unknown key": (["--model.init_args.bogus", "1"], ["bogus"]),
    "unknown config": (["--config", "nothing"], ["there is no 'nothing'", "quickstart"]),
    "negative batch": (["--data.batch_size", "-1"], ["batch_size", "-1"]),
    "negative rank": (["--model.init_args.backbone.lora_r", "-4"], ["lora_r", "-4"]),
    "unknown level": (["--data.env.init_args.level", "7"], ["env.level", "use 0, 1, 2 or 3"]),
    "clipping": (["--trainer.gradient_clip_val", "1"], ["gradient_clip_val", "clip_norm"]),
    "accumulation": (
        ["--trainer.accumulate_grad_batches", "2"],
        ["accumulate_grad_batches", "batch_size"],
    ),
    "template": (
        ["--model.init_args.roles.templates", "TEMPLATES"],
        ["successor.jinja:2", "unknown field 'futur'"],
    ),
    "no checkpoint": (["--ckpt_path", "nope.ckpt"], ["nope.ckpt", "no such checkpoint"]),
    "no last checkpoint": (["--ckpt_path", "last"], ["no last checkpoint"]),
    "foreign checkpoint": (["--ckpt_path", "foreign.ckpt"], ["foreign.ckpt", "not a checkpoint"]),
    "damaged checkpoint": (["--ckpt_path", "text.ckpt"], ["text.ckpt", "no checkpoint"]),
    "unknown model": (["--model.init_args.backbone.name", "/no/model"], ["/no/model"]),
}


@pytest.fixture(scope="module")
def refusals(
    commands: Callable[..., Any],
    config: str,
    bad_templates: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """The result of each case."""
    folder = tmp_path_factory.mktemp("errors")
    torch.save({"state_dict": {}}, folder / "foreign.ckpt")
    (folder / "text.ckpt").write_text("not a checkpoint\n", "utf-8")
    jobs = []
    for arguments, _ in CASES.values():
        given = [word.replace("TEMPLATES", str(bad_templates)) for word in arguments]
        jobs.append((folder, ["fit", "--config", config, *given]))
    return dict(zip(CASES, commands(jobs), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_wrong_settings_are_refused(case: str, refusals: dict[str, Any]) -> None:
    refusals[case].refusal(*CASES[case][1])


def test_files_of_another_run_are_refused(
    commands: Callable[..., Any], config: str, run_copy: Path
) -> None:
    buffer = run_copy / "run/replay.sqlite"
    before = shutil.copy(buffer, run_copy / "before.sqlite")
    fit = ["fit", "--config", config]
    rank, level, export, stats = commands(
        [
            (run_copy, [*fit, "--ckpt_path", "last", "--model.init_args.backbone.lora_r", "2"]),
            (run_copy, [*fit, "--data.env.init_args.level", "1"]),
            (run_copy, ["export", "nothing.ckpt", "out"]),
            (run_copy, ["replay", "stats", "nothing.sqlite"]),
        ]
    )
    rank.refusal("ckpt_path", "do not fit")
    level.refusal("replay.sqlite", "of another task", "help_desk/1")
    export.refusal("nothing.ckpt", "no such checkpoint")
    stats.refusal("nothing.sqlite")
    assert Path(before).read_bytes() == buffer.read_bytes()
