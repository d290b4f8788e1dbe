"""What a stop signal must not cut in two, and what stops a run at any other place."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_depth = 0
_waiting = False


@contextmanager
def whole() -> Iterator[None]:
    """Work that changes weights and their counters together: :func:`stop` waits for its end."""
    global _depth, _waiting
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        asked = _waiting and not _depth
        _waiting = _waiting and not asked
    if asked:
        raise KeyboardInterrupt


def stop() -> None:
    """Raise KeyboardInterrupt, at once or at the end of the :func:`whole` work under way."""
    global _waiting
    if not _depth:
        raise KeyboardInterrupt
    _waiting = True


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Cut off what hangs: TimeoutError if the body runs longer than ``seconds``.

    It interrupts Python code, sleeping and waiting for sockets included, but no computation inside
    a C extension. It needs the main thread; elsewhere there is no limit.
    """
    main = threading.current_thread() is threading.main_thread()
    sooner = main and hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0]
    if not main or not hasattr(signal, "setitimer") or 0 < sooner <= seconds:
        yield  # a limit around this one that comes first is enough
        return
    began = time.monotonic()

    over = False

    def cut(number: int, frame: FrameType | None) -> None:
        if not over:
            raise _Expired

    before = signal.signal(signal.SIGALRM, cut)
    # it fires again and again, for code that catches everything
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds, 1.0))
    try:
        try:
            try:
                yield
            finally:
                over = True
        finally:  # reached even if the timer goes off in the line above
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if outer:  # a timer of somebody else goes on
                left = max(outer - (time.monotonic() - began), 1e-3)
                signal.setitimer(signal.ITIMER_REAL, left, interval)
    except _Expired:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


class _Expired(BaseException):
    """No Exception, so that a bare ``except Exception`` in what hangs does not swallow it."""
