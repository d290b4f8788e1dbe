"""Damaged buffers: every damage is detected and named, and what is good can be copied."""

import os
import random
import sqlite3
from dataclasses import replace

import pytest

from nlac_lightning.commands import replay
from nlac_lightning.errors import ConfigError
from nlac_lightning.replay import commands
from nlac_lightning.replay import salvage as salvaging
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.replay.salvage import salvage

PAGE = 4096


@pytest.fixture
def path(tmp_path, fill):
    """A buffer's file with 40 episodes of several pages, nothing left in its log."""
    path = tmp_path / "replay.sqlite"
    with ReplayBuffer(path) as buffer:
        fill(buffer, [3, 1, 8, 4] * 10)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path


def episodes(path):
    with ReplayBuffer(path, read_only=True) as buffer:
        return {i: buffer.episode(i) for i in buffer.episode_ids()}


def overwrite(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_sound_buffer_is_copied_whole(path, tmp_path):
    result = salvage(path, tmp_path / "out.sqlite")
    assert result == (40, 0)
    assert episodes(tmp_path / "out.sqlite") == episodes(path)
    assert commands.check(tmp_path / "out.sqlite") == []


def test_what_is_only_in_the_log_is_copied_too(tmp_path, fill):
    path = tmp_path / "replay.sqlite"
    with ReplayBuffer(path) as buffer:
        fill(buffer, [2] * 5)
        assert (tmp_path / "replay.sqlite-wal").stat().st_size > 0
        assert salvage(path, tmp_path / "out.sqlite") == (5, 0)
    assert episodes(tmp_path / "out.sqlite") == episodes(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE turns SET policy_version = policy_version + 1 WHERE episode_id = 7 AND t = 0",
        "UPDATE turns SET text = replace(text, 'Sure', 'Surf') WHERE episode_id = 7",
        "UPDATE turns SET reward = reward + 0.5 WHERE episode_id = 7 AND t = 1",
        "UPDATE turns SET return_to_go = 9 WHERE episode_id = 7",
        "UPDATE episodes SET seed = 8 WHERE id = 7",
    ],
)
def test_a_change_of_any_value_is_named_and_left_behind(path, tmp_path, statement):
    connection = sqlite3.connect(path)
    assert connection.execute(statement).rowcount
    connection.commit()
    connection.close()
    assert commands.check(path) == ["episode 7: its content is not what was written"]
    before = episodes(path)
    assert salvage(path, tmp_path / "out.sqlite") == (39, 1)
    after = episodes(tmp_path / "out.sqlite")
    assert 7 not in after and all(after[i] == before[i] for i in after)


@pytest.mark.parametrize("claimed", [2, -1, 2**40], ids=["low", "negative", "huge"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_damaged_row_number_costs_one_episode(path, tmp_path, monkeypatch, which, claimed):
    """The lowest or the highest row number is what a damaged cell says."""
    real = salvaging._bound

    def bound(damaged, table, name):
        return (
            claimed
            if name == {"first": "min", "last": "max"}[which]
            else real(damaged, table, name)
        )

    monkeypatch.setattr(salvaging, "_bound", bound)
    assert salvage(path, tmp_path / "out.sqlite") == (40, 0)


def test_any_damaged_page_is_detected_and_the_rest_saved(path, tmp_path):
    original, sound = path.read_bytes(), episodes(path)
    rng = random.Random(0)
    pages = len(original) // PAGE
    saved = []
    for number in [0, 1, 2, *rng.sample(range(3, pages), 9)]:
        path.write_bytes(original)
        overwrite(path, number * PAGE, rng.randbytes(PAGE))
        found = commands.check(path)
        assert found, f"page {number} of {pages}"
        if number > 2:  # that the file can be opened at all
            assert any(f"page {number + 1}" in problem.lower() for problem in found), found
        out = tmp_path / f"out{number}.sqlite"
        kept, _ = salvage(path, out)
        saved_ones = episodes(out)
        assert len(saved_ones) == kept
        for i, episode in saved_ones.items():  # the page of the figures names codec and env
            assert replace(episode, codec="codec-a", env="desk") == sound[i]
        assert commands.check(out) == []
        saved.append(kept)
    # the first page and that of the figures hold no episode; an inner page may hold many
    assert saved[0] == saved[1] == 40 and sorted(saved)[len(saved) // 2] >= 30


def test_one_flipped_bit_is_detected(path):
    original = path.read_bytes()
    place = original.index(b"Hello, order 23")
    overwrite(path, place, bytes([original[place] ^ 1]))
    assert any("episode 24" in problem for problem in commands.check(path))


@pytest.mark.parametrize("share", [0.4, 0.8, 0.99])
def test_a_truncated_file_is_detected_and_its_start_saved(path, tmp_path, share):
    sound, size = episodes(path), path.stat().st_size
    os.truncate(path, int(size * share))
    problems = commands.check(path)
    assert problems and str(path) in problems[0]
    kept, _ = salvage(path, tmp_path / "out.sqlite")
    found = episodes(tmp_path / "out.sqlite")
    assert len(found) == kept and all(found[i] == sound[i] for i in found)
    assert kept >= (20 if share > 0.5 else 0)  # the list of episodes may be what was cut off
    assert commands.check(tmp_path / "out.sqlite") == []


def test_numbers_stay_so_that_a_run_can_go_on(path, tmp_path, make_episode):
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM turns WHERE episode_id = 40")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match=r"episode 40: 0 turns stored.*nlac replay salvage"):
        ReplayBuffer(path).episode(40)
    salvage(path, tmp_path / "out.sqlite")
    with ReplayBuffer(tmp_path / "out.sqlite", codec="codec-a", env="desk") as buffer:
        assert buffer.high_water_mark == 40 and buffer.num_episodes == 39
        assert buffer.append(make_episode(99)) == 41
        buffer.truncate(38)  # what a checkpoint of the run may ask for
        assert buffer.episode_ids()[-1] == 38


def test_evicted_episodes_come_along(tmp_path, fill):
    with ReplayBuffer(tmp_path / "a.sqlite", capacity=12) as buffer:
        fill(buffer, [3] * 6)
        live = buffer.episode_ids()
    salvage(tmp_path / "a.sqlite", tmp_path / "out.sqlite")
    with ReplayBuffer(tmp_path / "out.sqlite", capacity=12) as copy:
        assert copy.episode_ids() == live
        copy.truncate(5)  # undoes the last eviction
        assert copy.episode_ids()[0] < live[0]


def test_files_that_are_no_buffer(tmp_path, path):
    with pytest.raises(ConfigError, match="no such file"):
        salvage(tmp_path / "missing.sqlite", tmp_path / "out.sqlite")
    with pytest.raises(ConfigError, match="it exists"):
        salvage(path, path)
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"nothing like a database " * 1000)
    assert salvage(other, tmp_path / "out.sqlite").kept == 0


def test_the_command_says_what_it_saved(path, tmp_path, capsys):
    connection = sqlite3.connect(path)
    connection.execute("UPDATE turns SET text = '{}' WHERE episode_id = 3")
    connection.commit()
    connection.close()
    out = tmp_path / "new" / "out.sqlite"
    replay(["salvage", str(path), str(out)])
    assert (
        capsys.readouterr().out
        == f"39 whole episodes copied to {out}; 1 damaged ones left behind\n"
    )
    with pytest.raises(SystemExit, match="0"):
        replay(["check", str(out)])


def test_the_checksum_is_of_the_content(tmp_path, make_episode):
    episode = make_episode(3)
    changed = replace(episode, reason="other")
    sums = []
    for number, one in enumerate((episode, episode, changed)):
        with ReplayBuffer(tmp_path / f"{number}.sqlite") as buffer:
            buffer.append(one)
            with buffer._database.transaction() as connection:
                sums.append(connection.execute("SELECT checksum FROM episodes").fetchone()[0])
    assert sums[0] == sums[1] != sums[2]
