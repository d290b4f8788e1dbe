"""Back to a stored state: play its actions again in a fresh session."""

from __future__ import annotations

from collections.abc import Sequence

from nlac_lightning.envs.base import Session, Task, TextEnv
from nlac_lightning.errors import ConfigError


def tasks_by_id(env: TextEnv) -> dict[tuple[str, str], Task]:
    """All tasks of ``env``, found by split and id."""
    tasks = [task for split in ("train", "val", "test") for task in env.tasks(split)]
    return {(task.split, task.id): task for task in tasks}


def resume(env: TextEnv, task: Task, seed: int, past_actions: Sequence[str]) -> Session:
    """A session of ``task`` in the state that ``past_actions`` lead to.

    Args:
        env: the environment, with the settings of the stored episode.
        task, seed: as the episode was reset with.
        past_actions: its actions in order, up to the state.

    Raises:
        ConfigError: the episode ends before its last action, so the settings differ.
    """
    session = env.reset(task, seed)
    for t, action in enumerate(past_actions):
        step = session.step(action)
        if (step.terminated or step.truncated) and t + 1 < len(past_actions):
            session.close()
            raise ConfigError(
                "env",
                f"task '{task.id}' of {env.name} ends after {t + 1} of {len(past_actions)} "
                "stored actions",
                "use the environment settings with which the episode was played",
            )
    return session
