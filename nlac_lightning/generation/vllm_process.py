"""vLLM's offline engine in a process of an environment of its own.

What died, hung or was interrupted in the middle of an answer is killed with all its processes, and
the next call starts it again: no answer can reach the wrong question.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator
from typing import IO, Any

from nlac_lightning.generation import vllm_worker
from nlac_lightning.generation.vllm_engines import GenerationConfig, fault

_LOOK = 1.0
"""Seconds between looks at whether a silent process is still there: its children may hold its
pipes open."""
_LEAVE = 20.0
"""Seconds that an idle engine gets to end by itself."""


class Worker:
    """A process that runs :mod:`vllm_worker`, started at once and again after it has died.

    Args:
        config: its ``python``, ``seconds``, ``start_seconds`` and ``sleep``.
        settings: arguments of ``vllm.LLM``.

    Raises:
        ConfigError: it cannot be started, or ends before its first answer.
    """

    def __init__(self, config: GenerationConfig, settings: dict[str, Any]) -> None:
        self._config, self._settings = config, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._answered = False
        self._number = 0
        self.max_tokens = 0
        self._start()

    def complete(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._process is None:
            self._start()
        self._set_sleep(False)
        completions = self._ask({"complete": requests}, self._config.seconds)["completions"]
        self._answered = True
        self._set_sleep(True)
        return completions

    def forget(self, lora: dict[str, Any]) -> None:
        """vLLM gives its place to another one by itself."""

    def close(self) -> None:
        self._stop(_LEAVE)

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                [self._config.python, vllm_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the run, which needs the engine
            )
        except OSError as error:
            raise fault(
                self._answered,
                "model.compute.generation.python",
                str(error),
                "name the Python of vLLM's environment",
            ) from error
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._end = weakref.finalize(self, _end, process, _LEAVE)
        ready = self._ask({"start": self._settings}, self._config.start_seconds)
        self.max_tokens = ready["max_tokens"]
        self._set_sleep(True)

    def _set_sleep(self, asleep: bool) -> None:
        if self._config.sleep:
            self._ask({"sleep": asleep}, self._config.seconds)

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._number += 1
        process = self._process
        try:
            if process is None:  # closed by another thread
                raise OSError
            until = time.monotonic() + seconds
            _write(process, json.dumps({"id": self._number} | message).encode() + b"\n", until)
            answer = json.loads(_line(process, until))
            if answer["id"] != self._number:
                raise ValueError
            return answer
        except TimeoutError as error:
            self._stop()
            raise self._fault(f"it gave no answer within {seconds:g} s") from error
        except (OSError, ValueError) as error:
            self._stop(1.0)  # one that is ending shows its own status
            status = process.returncode if process else None
            raise self._fault(f"its process ended with status {status}") from error
        except BaseException:  # a stop signal, or the time limit of whoever asks
            self._stop()
            raise

    def _fault(self, why: str) -> Exception:
        return fault(
            self._answered,
            "model.compute.generation",
            f"vLLM: {why}",
            "see its messages above; check model.compute.generation.python and options",
        )

    def _stop(self, seconds: float = 0.0) -> None:
        process, self._process = self._process, None
        if process is not None and self._end is not None:
            self._end.detach()
            _end(process, seconds)


def _write(process: subprocess.Popen[bytes], data: bytes, until: float) -> None:
    assert process.stdin is not None
    rest = memoryview(data)
    for _ in _ready(process, process.stdin, selectors.EVENT_WRITE, until):
        rest = rest[os.write(process.stdin.fileno(), rest) :]
        if not rest:
            return


def _line(process: subprocess.Popen[bytes], until: float) -> bytes:
    assert process.stdout is not None
    data = bytearray()
    for _ in _ready(process, process.stdout, selectors.EVENT_READ, until):
        piece = os.read(process.stdout.fileno(), 2**20)
        if not piece:
            break
        data += piece
        if piece.endswith(b"\n"):
            return bytes(data)
    raise OSError("end of output")


def _ready(
    process: subprocess.Popen[bytes], pipe: IO[bytes], event: int, until: float
) -> Iterator[None]:
    """Yield whenever the pipe can be used; OSError where the process ends, TimeoutError."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if selector.select(min(left, _LOOK)):
                yield
            elif process.poll() is not None:
                raise OSError("it has ended")


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End an engine and its processes: by itself within ``seconds``, else by force."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if seconds:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
