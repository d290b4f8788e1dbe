"""Time limits on foreign code, and work that a stop signal waits for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from nlac_lightning.interrupts import stop, time_limit, whole


@pytest.fixture(autouse=True)
def own_timer() -> Iterator[None]:
    """pytest's own time limit is a timer too; it is put aside and must come back unharmed."""
    outer = signal.setitimer(signal.ITIMER_REAL, 600)
    yield
    left, _ = signal.setitimer(signal.ITIMER_REAL, *outer)
    assert 500 < left < 600


def sleeps() -> None:
    time.sleep(60)


def spins() -> None:
    while True:
        pass


def swallows() -> None:
    while True:
        with suppress(Exception):
            time.sleep(60)


def waits() -> None:
    threading.Event().wait(60)


@pytest.mark.parametrize("hang", [sleeps, spins, swallows, waits])
def test_what_hangs_is_cut_off(hang: object) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"), time_limit(0.2):
        hang()  # type: ignore[operator]
    assert time.monotonic() - began < 5


def test_what_is_quick_is_left_alone() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with time_limit(30):
        value = 1
    assert value == 1 and signal.getsignal(signal.SIGALRM) is handler
    with pytest.raises(ValueError, match="its own"), time_limit(30):
        raise ValueError("its own")


def test_limits_may_be_nested() -> None:
    with time_limit(30), pytest.raises(TimeoutError), time_limit(0.1):
        time.sleep(60)
    with pytest.raises(TimeoutError), time_limit(0.3), time_limit(30):
        time.sleep(60)


def test_another_thread_has_no_limit() -> None:
    done: list[int] = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


def test_a_stop_waits_for_the_end_of_whole_work() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), whole():
        stop()
        with whole():
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    with whole():
        done.append("later")
    with pytest.raises(KeyboardInterrupt):
        stop()


def test_a_stop_that_ended_the_work_itself_is_not_remembered() -> None:
    with pytest.raises(KeyboardInterrupt), whole():
        stop()
        raise KeyboardInterrupt
    with whole():
        pass


def test_an_error_in_whole_work_stays_the_error() -> None:
    with pytest.raises(ValueError, match="first"), whole():
        raise ValueError("first")
    with whole():
        pass
