"""The commands behind ``nlac replay``."""

import os
import sqlite3

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay import commands
from nlac_lightning.replay.buffer import ReplayBuffer


@pytest.fixture
def path(tmp_path, fill):
    path = tmp_path / "replay.sqlite"
    with ReplayBuffer(path) as buffer:
        fill(buffer, [3] * 5)
    return path


def test_stats_is_a_table(path):
    lines = dict(line.split("  ", 1) for line in commands.stats(path).splitlines())
    table = {name.strip(): value.strip() for name, value in lines.items()}
    assert table["environment"] == "desk"
    assert (table["episodes"], table["transitions"], table["mean turns"]) == ("5", "15", "3.00")
    reasons = [int(value) for name, value in table.items() if name.startswith("ended by")]
    assert sum(reasons) == 5


def test_stats_while_a_run_writes(path, make_episode):
    with ReplayBuffer(path) as writer, writer._database.transaction(write=True):
        assert "15" in commands.stats(path)


def test_export_then_import(path, tmp_path):
    out, copy = tmp_path / "episodes.parquet", tmp_path / "copy.sqlite"
    assert commands.export(path, out).startswith("5 episodes written")
    assert "5 episodes added" in commands.import_episodes(copy, out)
    assert "now holds 10" in commands.import_episodes(copy, out)
    with pytest.raises(ConfigError, match="no such file"):
        commands.import_episodes(tmp_path / "other.sqlite", tmp_path / "missing.parquet")
    assert not (tmp_path / "other.sqlite").exists()


def damage(path, statement):
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_check_accepts_a_sound_buffer(path):
    assert commands.check(path) == []


@pytest.mark.parametrize(
    ("statement", "problems"),
    [
        ("DELETE FROM turns WHERE episode_id = 2 AND t = 1", ["episode 2: 2 turns stored, 3"]),
        ("UPDATE turns SET text = '{' WHERE episode_id = 3", ["episode 3: "]),
        ("UPDATE turns SET delta_ids = x'010203' WHERE episode_id = 4", ["episode 4: "]),
        ("UPDATE meta SET transitions = 7", ["7 transitions counted, 15 stored"]),
        (
            "INSERT INTO turns SELECT 99, t, text, delta_ids, action_start, action_end, logprobs,"
            " policy_version, explored, reward, terminated, truncated, 0, 0, 0 FROM turns"
            " WHERE episode_id = 1 AND t = 0",
            ["of turns belongs to no episode"],
        ),
    ],
)
def test_check_names_what_is_wrong(path, statement, problems):
    damage(path, statement)
    found = commands.check(path)
    assert len(found) == len(problems)
    for problem, text in zip(problems, found, strict=True):
        assert problem in text


def test_check_of_something_else(path, tmp_path):
    assert "no such file" in commands.check(tmp_path / "missing.sqlite")[0]
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    assert commands.check(path)
