"""Learning curves from event files as a real SummaryWriter leaves them."""

import warnings
from pathlib import Path

import pytest
from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from nlac_lightning.errors import ConfigError
from nlac_lightning.report import curves
from nlac_lightning.report.curves import plot_runs


def write(folder: Path, points: dict[str, list[tuple[int, float]]], start: float = 0.0) -> None:
    """One process's event file; ``start`` is the wall time of its first event."""
    with SummaryWriter(str(folder), filename_suffix=f".{start:.0f}") as writer:
        for tag, values in points.items():
            for i, (step, value) in enumerate(values):
                writer.add_scalar(tag, value, step, walltime=start + i)


def run(gain: float) -> dict[str, list[tuple[int, float]]]:
    steps = range(0, 50, 10)
    return {
        "val/success": [(s, gain * s) for s in steps],
        "val/success_low": [(s, gain * s * 0.8) for s in steps],
        "val/success_high": [(s, min(1.0, gain * s * 1.2)) for s in steps],
        "env/episodes": [(s, 4.0 * s) for s in range(5, 50, 5)],
        "gen/tokens": [(s, 1000.0 * s) for s in range(5, 50, 5)],
    }


def size(path: Path) -> tuple[int, ...]:
    return imread(path).shape[:2]


def test_three_panels_and_a_single_one(tmp_path: Path) -> None:
    write(tmp_path / "a", run(0.02))
    write(tmp_path / "b", run(0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert plot_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "all.png") == []
        assert plot_runs([tmp_path / "a"], tmp_path / "one.png", x="episodes") == []
    assert size(tmp_path / "all.png")[1] == 3 * size(tmp_path / "one.png")[1]


def test_counts_are_those_known_at_the_step(tmp_path: Path) -> None:
    write(tmp_path, {"val/success": [(0, 0.1), (7, 0.2), (40, 0.9)], "env/episodes": [(5, 8.0)]})
    scalars = curves.read_scalars(tmp_path)
    xs = [x for x, _ in curves._curve(scalars, "val/success", "env/episodes")]
    assert xs == [0.0, 8.0, 8.0]


def test_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, {"val/success": [(10, 0.1), (20, 0.2), (30, 0.3), (35, 0.4)]}, start=100)
    write(tmp_path, {"val/success": [(30, 0.5), (40, 0.6)]}, start=200)
    points = curves.read_scalars(tmp_path)["val/success"]
    assert [step for step, _ in points] == [10, 20, 30, 40]
    assert [value for _, value in points] == pytest.approx([0.1, 0.2, 0.5, 0.6])


def test_truncated_event_file_keeps_what_is_whole(tmp_path: Path) -> None:
    write(tmp_path, {"val/success": [(s, s / 100) for s in range(20)]})
    file = next(tmp_path.glob(curves.EVENT_FILES))
    file.write_bytes(file.read_bytes()[:-13])
    points = curves.read_scalars(tmp_path)["val/success"]
    assert [step for step, _ in points] == list(range(19))
    assert plot_runs([tmp_path], tmp_path / "out.png")


def test_all_points_of_a_long_run_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"loss": [(s, 1.0) for s in range(12_000)]})
    assert len(curves.read_scalars(tmp_path)["loss"]) == 12_000


def test_missing_tags_are_named(tmp_path: Path) -> None:
    write(tmp_path / "full", run(0.01))
    write(tmp_path / "bare", {"val/success": [(0, 0.1), (10, 0.3)]})
    write(tmp_path / "lost", {"loss": [(0, 0.1)]})
    runs = [tmp_path / name for name in ("full", "bare", "lost")]
    assert sorted(plot_runs(runs, tmp_path / "out.png")) == [
        "bare: no env/episodes",
        "bare: no gen/tokens",
        "lost: no env/episodes",
        "lost: no gen/tokens",
        "lost: no val/success",
    ]


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    for name in ("x/version_0", "y/version_0", "y/version_1"):
        write(tmp_path / name, run(0.01))
    named = dict(curves._named([tmp_path / "x", tmp_path / "y", tmp_path / "y/version_1"]))
    assert list(named) == ["x/version_0", "y/version_0", "y/version_1"]
    assert named["y/version_1"] == (tmp_path / "y/version_1").resolve()


def test_names_leave_out_an_end_that_all_share(tmp_path: Path) -> None:
    for name in ("nlac/seed_0", "nlac/seed_1", "grpo/seed_0"):
        write(tmp_path / name / "logs/version_0", run(0.01))
    names = [name for name, _ in curves._named([tmp_path])]
    assert names == ["grpo/seed_0", "nlac/seed_0", "nlac/seed_1"]
    assert [curves._without_seed(name) for name in names] == ["grpo", "nlac", "nlac"]


def test_the_mean_over_seeds_is_at_the_steps_that_all_have() -> None:
    steps = [[0, 10, 20], [0, 20, 30]]
    points = [[(0.0, 0.0), (4.0, 0.2), (8.0, 0.4)], [(0.0, 0.2), (12.0, 0.8), (16.0, 0.9)]]
    assert curves.mean_curve(steps, points) == [
        (0.0, pytest.approx(0.1)), (10.0, pytest.approx(0.6)),
    ]  # fmt: skip


def test_held_out_evaluations_make_a_curve(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "env/episodes": [(0, 64.0), (9, 80.0)],
            "test/base/success": [(0, 0.1)],
            "test/trained/success": [(10, 0.7)],
        },
    )
    scalars = curves.read_scalars(tmp_path)
    curve = curves._curve(scalars, "test/success", "env/episodes")
    assert curve == [(0.0, pytest.approx(0.1)), (80.0, pytest.approx(0.7))]
    assert plot_runs([tmp_path], tmp_path / "out.png") == [f"{tmp_path.name}: no gen/tokens"]


def test_wrong_settings_say_so(tmp_path: Path) -> None:
    write(tmp_path / "a", {"loss": [(0, 0.1)]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no event files"):
        plot_runs([tmp_path / "empty"], tmp_path / "out.png")
    with pytest.raises(ConfigError, match=r"a: no val/success.*loss"):
        plot_runs([tmp_path / "a"], tmp_path / "out.png", x="step")
    with pytest.raises(ConfigError, match="out"):
        plot_runs([tmp_path / "a"], tmp_path / "out.xyz", metrics=["loss"])
    with pytest.raises(ConfigError, match="epochs"):
        plot_runs([tmp_path / "a"], tmp_path / "out.png", x="epochs")
