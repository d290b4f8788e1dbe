"""Checkpoint files are whole or not there, whatever ends the writing."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nlac_lightning import checkpoint
from nlac_lightning.checkpoint import (
    CheckpointWriteError,
    SafeCheckpointIO,
    read_checkpoint,
    write_whole,
)
from nlac_lightning.errors import ConfigError


def content(step: int) -> dict[str, Any]:
    return {
        "global_step": step,
        "nlac": {"lora": {}},
        "state_dict": {"w": torch.full((500,), step)},
    }


def test_a_replaced_file_stays_beside_the_new_one(tmp_path: Path) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    for step in (1, 2, 3):
        io.save_checkpoint(content(step), path)
    assert io.load_checkpoint(path)["global_step"] == 3
    assert read_checkpoint(Path(f"{path}.previous"))["global_step"] == 2
    assert {p.name for p in path.parent.iterdir()} == {"last.ckpt", "last.ckpt.previous"}


def test_file_systems_without_hard_links_do(tmp_path: Path, monkeypatch: Any) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_a_replaced_file_stays_beside_the_new_one(tmp_path)


@pytest.mark.parametrize("damage", ["half", "empty", "flipped"])
def test_a_damaged_file_is_refused_and_the_one_before_named(tmp_path: Path, damage: str) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint(content(1), path)
    io.save_checkpoint(content(2), path)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[data.index(b"\2\0\0\0\0\0\0\0\2") + 50] ^= 4
    path.write_bytes({"half": data[: len(data) // 2], "empty": b"", "flipped": data}[damage])
    with pytest.raises(ConfigError, match=r"damaged.*--ckpt_path \S+last\.ckpt\.previous"):
        io.load_checkpoint(path)
    assert io.load_checkpoint(f"{path}.previous")["global_step"] == 1


def test_nothing_but_plain_values_is_read(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "harm"),))

    torch.save({**content(1), "bad": Runs()}, tmp_path / "bad.ckpt")
    for weights_only in (None, True, False):
        with pytest.raises(ConfigError, match="no checkpoint"):
            SafeCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", None, weights_only)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("call", ["write", "flush", "fsync", "copy", "replace 1", "replace 2"])
def test_a_failure_at_any_moment_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "last.ckpt"
    write_whole(path, b"old")
    name, _, nth = call.partition(" ")
    seen = 0

    def fail(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if name == "copy" or seen == int(nth or 1):
            raise OSError(28, "No space left on device")
        return original(*args)

    if name in ("write", "flush"):
        real = Path.open

        def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return Failing(self, name) if mode == "wb" else real(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", opened)
    elif name == "copy":  # neither a second name nor a copy can be had
        original = os.link
        monkeypatch.setattr(checkpoint.os, "link", fail)
        monkeypatch.setattr(checkpoint.shutil, "copyfile", fail)
    else:
        original = getattr(os, name)
        monkeypatch.setattr(checkpoint.os, name, fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new content")
    assert path.read_bytes() == b"old"
    assert not list(tmp_path.glob("*.part"))


class Failing:
    """A file that fails in one call."""

    def __init__(self, path: Path, name: str) -> None:
        self.file, self.name = open(path, "wb"), name  # noqa: SIM115

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        if name == self.name:
            raise OSError(28, "No space left on device")
        return getattr(self.file, name)


KILLED = """
import os, signal, sys
from pathlib import Path
from nlac_lightning import checkpoint

path, until = Path(sys.argv[1]), int(sys.argv[2])
lines = 0

def trace(frame, event, argument):
    global lines
    if frame.f_code is checkpoint.write_whole.__code__ and event == "line":
        lines += 1
        if lines == until:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace

checkpoint.write_whole(path, b"old" * 1000)
sys.settrace(trace)
checkpoint.write_whole(path, b"new" * 1000)
"""


def test_kill_9_at_every_line_of_the_writing_leaves_a_whole_file(tmp_path: Path) -> None:
    # one process that forks a child per line: the imports are paid for once
    program = f"""
import os, sys
source = compile({KILLED!r}, "killed", "exec")
import nlac_lightning.checkpoint
for line in range(1, 40):
    child = os.fork()
    if not child:
        sys.argv = ["x", sys.argv[1] + f"/{{line}}.ckpt", str(line)]
        exec(source, {{}})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    codes = [int(code) for code in done.stdout.split()]
    killed = codes.index(0)
    assert killed >= 12 and codes[:killed] == [-signal.SIGKILL] * killed
    found = [(tmp_path / f"{n}.ckpt").read_bytes() for n in range(1, 40)]
    assert set(found) == {b"old" * 1000, b"new" * 1000}
    assert found[0] == b"old" * 1000 and found[killed] == b"new" * 1000


FULL = """
import resource, sys
from pathlib import Path
import torch
from nlac_lightning.checkpoint import CheckpointWriteError, SafeCheckpointIO
from nlac_lightning.replay import Episode, ReplayBuffer, Turn
from nlac_lightning.replay.buffer import BufferWriteError

folder = Path(sys.argv[1])
big = {"nlac": {"lora": {}}, "w": torch.zeros(300_000)}
SafeCheckpointIO().save_checkpoint({"nlac": {"lora": {}}}, folder / "last.ckpt")
turn = Turn("a", "a", tuple(range(9000)), 0, 1, (), "given", 0, False, [], 0.0, True, False)
episode = Episode("e", "t", "train", 0, "c", [], (1,), [turn], "done")
buffer = ReplayBuffer(folder / "replay.sqlite")
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    SafeCheckpointIO().save_checkpoint(big, folder / "last.ckpt")
except CheckpointWriteError as error:
    print(error)
stored = 0
try:
    while True:
        stored = buffer.append(episode)
except BufferWriteError as error:
    print(error)
print(stored)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs limits on files")
def test_files_that_cannot_grow_cost_nothing_that_was_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    first, second, stored = done.stdout.splitlines()
    assert "could not write the checkpoint" in first and "free space" in first
    assert "could not write" in second and "every earlier episode is safe" in second
    assert "lora" in read_checkpoint(tmp_path / "last.ckpt")["nlac"]
    assert not list(tmp_path.glob("*.part"))
    from nlac_lightning.replay import ReplayBuffer

    with ReplayBuffer(tmp_path / "replay.sqlite") as buffer:
        assert buffer.num_episodes == int(stored) > 2 and buffer.problems() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        io = SafeCheckpointIO()
        io.save_checkpoint(content(1), disk / "last.ckpt")
        with pytest.raises(CheckpointWriteError, match="No space left"):
            io.save_checkpoint({**content(2), "x": torch.zeros(10**6)}, disk / "last.ckpt")
        assert io.load_checkpoint(disk / "last.ckpt")["global_step"] == 1
        assert [path.name for path in disk.iterdir()] == ["last.ckpt"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
