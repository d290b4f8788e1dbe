"""Wrong files, a full disk and kill -9: one clear message, and nothing committed is lost."""

import os
import re
import signal
import sqlite3
import subprocess
import sys

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.buffer import BufferWriteError, ReplayBuffer
from nlac_lightning.replay.schema import SCHEMA_VERSION


@pytest.fixture
def path(tmp_path, fill):
    """A buffer's file with five episodes."""
    path = tmp_path / "replay.sqlite"
    with ReplayBuffer(path) as buffer:
        fill(buffer, [3] * 5)
    return path


def open_fails(path, pattern, **options):
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*{pattern}.*Fix: "):
        ReplayBuffer(path, **options)
    assert before is None or path.read_bytes() == before


def test_not_a_database(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not episodes\n" * 100)
    open_fails(path, "not a replay buffer")
    open_fails(path, "not a replay buffer", read_only=True)


def test_database_of_another_program(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE meta (x)")
    connection.close()
    open_fails(path, "not a replay buffer")


def test_older_schema(path):
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    connection.close()
    open_fails(path, f"schema {SCHEMA_VERSION - 1}, older")


def test_newer_schema(path):
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    open_fails(path, f"schema {SCHEMA_VERSION + 1}, newer")


def test_another_codec_and_another_task(path):
    open_fails(path, "codec 'codec-a', not 'codec-b'", codec="codec-b")
    open_fails(path, "env 'desk', not 'quiz'", env="quiz")
    assert len(ReplayBuffer(path, codec="codec-a", env="desk")) == 15


def test_a_new_file_is_claimed_by_its_settings(tmp_path, make_episode):
    buffer = ReplayBuffer(tmp_path / "new.sqlite", codec="codec-b", env="desk")
    with pytest.raises(ConfigError, match="codec 'codec-b', not 'codec-a'"):
        buffer.append(make_episode(0))
    assert buffer.append(make_episode(0, codec="codec-b")) == 1


def test_read_only_needs_a_file_and_refuses_writes(tmp_path, path, make_episode):
    open_fails(tmp_path / "missing.sqlite", "no such file", read_only=True)
    assert not (tmp_path / "missing.sqlite").exists()
    buffer = ReplayBuffer(path, read_only=True)
    with pytest.raises(BufferWriteError, match="readonly"):
        buffer.append(make_episode(9))
    assert len(buffer) == 15


def test_a_folder_is_not_a_file(tmp_path):
    open_fails(tmp_path, "cannot be opened")


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(tmp_path, capacity):
    with pytest.raises(ConfigError, match=r"data\.capacity"):
        ReplayBuffer(tmp_path / "replay.sqlite", capacity=capacity)


def test_damaged_pages_are_reported_as_damage(path):
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(ConfigError, match="damaged"):
        list(ReplayBuffer(path).iter_episodes())


def test_full_disk_keeps_every_earlier_episode(path, make_episode):
    buffer = ReplayBuffer(path)
    earlier = list(buffer.iter_episodes())
    connection = buffer._database.connection()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite's own "disk is full"
    with pytest.raises(BufferWriteError, match=r"full.*earlier episode is safe.*free space"):
        buffer.append(make_episode(9, turns=500))
    assert list(buffer.iter_episodes()) == earlier
    assert buffer.problems() == []
    connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert buffer.append(make_episode(9, turns=500)) == 6


APPEND_FOR_EVER = """
import sys
from nlac_lightning.replay import Episode, ReplayBuffer, Turn

turn = Turn("act", "act", tuple(range(200)), 0, 100, (-0.5,) * 100, "stop", 0, False, [], 0.0,
            False, False)
opening = [{"role": "user", "content": "hello"}]
buffer = ReplayBuffer(sys.argv[1], capacity=int(sys.argv[2]))
while True:
    episode = Episode("desk", "t", "train", 0, "c", opening, (1, 2), [turn] * 20, "done")
    print(buffer.append(episode), flush=True)
"""


@pytest.mark.parametrize("capacity", [100_000, 200])
def test_kill_9_loses_no_committed_episode_and_leaves_no_half_one(tmp_path, capacity):
    path = tmp_path / "replay.sqlite"
    given = 0
    for delay in (3, 17, 40):  # killed at different moments, each time continuing the same file
        process = subprocess.Popen(
            [sys.executable, "-c", APPEND_FOR_EVER, str(path), str(capacity)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        printed = [int(process.stdout.readline()) for _ in range(delay)]
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        assert printed[0] == given + 1  # ids never repeat, and none was lost
        with ReplayBuffer(path, capacity) as buffer:
            given = buffer.high_water_mark
            assert given - printed[-1] in (0, 1)  # one may be committed but not yet printed
            assert buffer.episode_ids()[-1] == given
            assert buffer.num_episodes == min(given, capacity // 20)
            assert all(len(episode.turns) == 20 for episode in buffer.iter_episodes())
            assert buffer.problems() == []
