"""An environment whose calls are cut off in any thread.

:func:`~nlac_lightning.interrupts.time_limit` needs the main thread. Here the calls are made by a
helper thread that is left behind when it hangs; another one makes the next call. What it was doing
may go on for ever, but its episode has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nlac_lightning.envs.base import OracleCritique, Session, Step, Task, TextEnv

T = TypeVar("T")
_Calls = queue.SimpleQueue[Any]


class LimitedEnv(TextEnv):
    """``env`` with a limit on each of its calls.

    Args:
        env: the environment; its calls come from one thread at a time.
        seconds: wall-clock limit of a call; what takes longer raises TimeoutError.
    """

    def __init__(self, env: TextEnv, seconds: float) -> None:
        self.env, self.seconds, self.name = env, seconds, env.name
        self._calls: _Calls | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        return self.env.tasks(split)

    def reset(self, task: Task, seed: int = 0) -> Session:
        return _LimitedSession(self, self.within(lambda: self.env.reset(task, seed)))

    def within(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises; TimeoutError."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._calls,), name="environment", daemon=True
            ).start()
        answer: _Calls = queue.SimpleQueue()
        self._calls.put((function, answer))
        try:
            value, error = answer.get(timeout=self.seconds)
        except queue.Empty:
            self.leave()
            raise TimeoutError(f"no answer within {self.seconds:g} s") from None
        if error is not None:
            raise error
        return value

    def leave(self) -> None:
        """End the helper thread, as soon as it can."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


class _LimitedSession(Session):
    def __init__(self, limited: LimitedEnv, session: Session) -> None:
        self._limited, self._session = limited, session
        self.opening = session.opening

    def step(self, action: str) -> Step:
        return self._limited.within(lambda: self._session.step(action))

    def admissible(self) -> Sequence[str]:
        return self._limited.within(lambda: list(self._session.admissible()))

    def oracle_action(self) -> str | None:
        return self._limited.within(self._session.oracle_action)

    def oracle_critique(self, action: str) -> OracleCritique | None:
        return self._limited.within(lambda: self._session.oracle_critique(action))

    def reseed(self, seed: int) -> None:
        self._limited.within(lambda: self._session.reseed(seed))

    def close(self) -> None:
        self._limited.within(self._session.close)


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer.put((function(), None))
        except BaseException as error:
            answer.put((None, error))
