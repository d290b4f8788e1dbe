"""Checkpoint files that are whole or not there: written aside, synced to the disk, then renamed."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from nlac_lightning.errors import ConfigError, StoppedRun

PREVIOUS = ".previous"
"""Added to a checkpoint's name: the file that it replaced."""


class CheckpointWriteError(StoppedRun):
    """A checkpoint did not reach the disk; the one before it is untouched."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"{path}: could not write the checkpoint ({cause}); what stood there before is "
            "untouched. Fix: free space on the disk or make the folder writable, then continue "
            "with --ckpt_path last"
        )


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, safe against kill -9, a full disk and foreign content.

    A file that is replaced stays beside the new one as ``NAME.previous``. Nothing but tensors and
    plain values is ever read. Addresses of remote stores go Lightning's own way.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint``; :class:`CheckpointWriteError` if the disk does not take it."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = io.BytesIO()  # torch's own writer may abort the process on a full disk
        torch.save(checkpoint, content)
        try:
            write_whole(Path(path), content.getbuffer())
        except OSError as error:
            raise CheckpointWriteError(Path(path), error) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Content of a whole checkpoint of this package, on the CPU; else :class:`ConfigError`."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(Path(path))


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Replace ``path`` so that every moment finds the old file or the new one, never a part.

    Raises OSError, and then leaves what was there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.is_file():
            link = path.with_name(path.name + ".link")
            link.unlink(missing_ok=True)
            _keep(path, link)
            os.replace(link, path.with_name(path.name + PREVIOUS))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _keep(path: Path, other: Path) -> None:
    """Another name for a file, which keeps its own until a new file takes it."""
    try:
        os.link(path, other)
    except OSError:  # file systems without hard links
        shutil.copyfile(path, other)


def _sync_folder(folder: Path) -> None:
    """Make the renames survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Content of a checkpoint file of this package, else :class:`ConfigError`."""
    fix = "name a .ckpt file that `nlac fit` wrote"
    if not path.is_file():
        raise ConfigError(str(path), "there is no such checkpoint", fix)
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare the checksums
            if broken := archive.testzip():
                raise ValueError(f"{broken} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any foreign file: torch raises whatever its parts do
        previous = path.with_name(path.name + PREVIOUS)
        if previous.is_file():
            fix = f"continue from the one before it: --ckpt_path {previous}"
        raise ConfigError(
            str(path), f"it is no checkpoint, or damaged ({type(error).__name__})", fix
        ) from error
    if not isinstance(content, dict) or "lora" not in content.get("nlac", {}):
        raise ConfigError(str(path), "it is not a checkpoint of this package", fix)
    return content
