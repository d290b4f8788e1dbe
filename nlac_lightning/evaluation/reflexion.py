"""Retries with reflection (Reflexion, arXiv 2303.11366) as a way to evaluate any policy.

After a failed episode the model writes what to do differently; the next try of the same task
starts with these lessons in its system message. The failure itself is taken from the true reward,
which a deployed agent does not have, so these numbers are reported apart from single tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nlac_lightning.envs.base import Message, OracleCritique, Session, Step, Task, TextEnv
from nlac_lightning.replay.episode import Episode

INSTRUCTION = (
    "The conversation above is over, and the task was not solved. In two or three sentences: what "
    "went wrong, and what should be done differently in the next try? Be concrete.\nLesson:"
)
LESSONS = "Lessons from earlier failed tries of this very task:"
MAX_LESSON = 1000
"""Characters of a lesson that are kept."""


@runtime_checkable
class Reflects(Protocol):
    """An actor that also writes a lesson for each failed episode; empty where it cannot."""

    def reflect(self, episodes: Sequence[Episode], instruction: str, seed: int) -> list[str]:
        """One text per episode."""
        ...


class LessonsEnv(TextEnv):
    """An environment whose first state also holds the lessons of a task."""

    def __init__(self, env: TextEnv, lessons: dict[str, list[str]]) -> None:
        self.env, self.lessons = env, lessons
        self.name = env.name

    def tasks(self, split: str) -> Sequence[Task]:
        return self.env.tasks(split)

    def reset(self, task: Task, seed: int = 0) -> Session:
        return _LessonsSession(self.env.reset(task, seed), self.lessons.get(task.id, []))


class _LessonsSession(Session):
    def __init__(self, session: Session, lessons: list[str]) -> None:
        self.session = session
        self.opening = _with_lessons(session.opening, lessons)

    def step(self, action: str) -> Step:
        return self.session.step(action)

    def admissible(self) -> Sequence[str]:
        return self.session.admissible()

    def oracle_action(self) -> str | None:
        return self.session.oracle_action()

    def oracle_critique(self, action: str) -> OracleCritique | None:
        return self.session.oracle_critique(action)

    def close(self) -> None:
        self.session.close()


def add_lessons(
    lessons: dict[str, list[str]], failed: Sequence[Episode], reflects: Reflects, seed: int
) -> None:
    """Ask for a lesson from each failed episode and remember it under its task."""
    for episode, text in zip(failed, reflects.reflect(failed, INSTRUCTION, seed), strict=True):
        if text:
            lessons.setdefault(episode.task_id, []).append(text[:MAX_LESSON])


def _with_lessons(opening: list[Message], lessons: list[str]) -> list[Message]:
    if not lessons:
        return list(opening)
    listed = "\n".join([LESSONS, *(f"- {' '.join(lesson.split())}" for lesson in lessons)])
    if opening and opening[0]["role"] == "system":
        first: Message = {**opening[0], "content": f"{opening[0]['content']}\n\n{listed}"}
        return [first, *opening[1:]]
    return [{"role": "system", "content": listed}, *opening]
