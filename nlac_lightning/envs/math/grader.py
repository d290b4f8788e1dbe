"""Grading in processes of its own, with a limit that nothing outlives.

math-verify keeps its time limit by signals, which exist in a main thread alone: called from other
threads it refuses every comparison (some versions by calling it unequal). Here each grade is one
line to a worker process and one back, so any number of threads get what one would get.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nlac_lightning.errors import ConfigError, require_positive

MAX_CHARS = 1000
"""Longer answers are wrong unread."""

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0
"""Loading math-verify takes 2 s, and far more on a busy machine."""


@dataclass(frozen=True)
class Grade:
    """What the grader says.

    Attributes:
        correct: the answer equals the right one.
        error: why it could not be compared, or None.
    """

    correct: bool
    error: str | None = None


class Grader:
    """Compares answers by math-verify; may be used from many threads at once.

    Args:
        seconds: wall-clock limit of one comparison; a worker that takes longer is killed and
            replaced, and the answer counts as wrong with an ``error``.
        workers: processes, started when first needed.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, seconds: float = 10.0, workers: int = 1) -> None:
        require_positive("env.grading_seconds", seconds)
        require_positive("env.graders", workers)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("env", "grading needs math-verify", "run pip install -e '.[math]'")
        self.seconds = seconds
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(_Worker())

    def grade(self, gold: str, answer: str) -> Grade:
        """Whether ``answer`` equals ``gold``; both are what stands in ``\\boxed{}``."""
        if len(answer) > MAX_CHARS:
            return Grade(False, f"more than {MAX_CHARS} characters")
        worker = self._idle.get()
        try:
            return worker.ask({"gold": boxed(gold), "answer": boxed(answer)}, self.seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the idle workers; the next grade starts new ones."""
        for worker in list(self._idle.queue):
            worker.stop()


class _Worker:
    """One process, started on demand."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: dict[str, str], seconds: float) -> Grade:
        try:
            process = self._running()
            assert process.stdin is not None
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            said = json.loads(self._line(seconds))
            return Grade(bool(said["equal"]), said["error"])
        except TimeoutError:
            self.stop()
            return Grade(False, f"no result within {seconds:g} s")
        except (OSError, ValueError):  # it died: out of memory, or a crash in a library
            self.stop()
            return Grade(False, "the grader died")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._line(_START_SECONDS)  # it says that it is ready
        return self._process

    def _line(self, seconds: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        out, data, end = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(end - time.monotonic(), 0.0)):
                    raise TimeoutError
                piece = os.read(out, 65536)
                if not piece:
                    raise OSError("end of output")
                data += piece
        return data

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                with contextlib.suppress(OSError):  # what it never read cannot be flushed
                    pipe.close()
            self._process = None

    def __del__(self) -> None:
        self.stop()


def boxed(text: str) -> str:
    """``text`` in a box."""
    return f"\\boxed{{{text}}}"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last whole ``\boxed{...}``, braces matched; None without one."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for i in range(begin, len(text)):
            escaped = text[i - 1] == "\\"
            depth += (text[i] == "{" and not escaped) - (text[i] == "}" and not escaped)
            if depth == 0:
                return text[begin + 1 : i].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None
