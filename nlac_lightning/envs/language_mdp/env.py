"""The language MDP as an environment: settings, tasks by split, sessions, exact figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.envs.language_mdp.exact import ExactWorld
from nlac_lightning.envs.language_mdp.levels import SHARES, make_world
from nlac_lightning.envs.language_mdp.session import LanguageMDPSession
from nlac_lightning.envs.language_mdp.solve import Array, success_rate
from nlac_lightning.envs.language_mdp.texts import vocabulary
from nlac_lightning.errors import ConfigError, require_choice, require_positive


class LanguageMDPEnv(TextEnv):
    """A walk through rooms to a goal; reward 1 on arrival. Every value is known exactly.

    One map for all tasks, which no text shows as a whole: the agent sees where it is, its goal and
    where each exit leads, and must learn the rest. Traps end a walk, and after any other move it
    ends by chance with one fixed probability, so the process is stationary and needs no limit.

    Args:
        level: 1 (20 rooms, one goal), 2 (24 rooms, two goals) or 3 (30 rooms, three goals, uniform
            success at most 0.02). Goals are 4 moves away or more at every level.
        n_train, n_val, n_test: number of tasks of each split. A split has a fixed set of (start,
            goal) pairs that no other has; more tasks than pairs repeat them, with other luck.
        seed: other seeds give other maps; 0 or more.

    Raises:
        ConfigError: a setting that is out of range.
    """

    def __init__(
        self,
        level: int = 2,
        n_train: int = 256,
        n_val: int = 96,
        n_test: int = 96,
        seed: int = 0,
    ) -> None:
        require_positive("env.seed", seed, zero=True)
        self._sizes = dict(zip(SHARES, (n_train, n_val, n_test), strict=True))
        for split, size in self._sizes.items():
            require_positive(f"env.n_{split}", size)
        self.world = make_world(level, seed)
        self.name = f"language_mdp/{level}-{seed}"
        self.level, self.seed = level, seed

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks ``train-0000``, ...; the pairs of the split take turns."""
        require_choice("split", split, tuple(SHARES))
        pairs = self.world.splits[split]
        tasks = []
        for i in range(self._sizes[split]):
            start, goal = pairs[i % len(pairs)]
            data = {"start": start, "goal": goal, "luck": i // len(pairs)}
            tasks.append(Task(f"{split}-{i:04d}", split, data))
        return tasks

    def reset(self, task: Task, seed: int = 0) -> LanguageMDPSession:
        """Start a walk; ``seed`` decides when it ends by chance."""
        state = (task.data["start"], task.data["goal"])
        if state not in self.world.exact.index:
            raise ConfigError(
                "env.seed",
                f"task '{task.id}' from {state[0]} to {state[1]} is not of {self.name}",
                "use the level and seed that the task was made with",
            )
        key = np.random.SeedSequence([seed, task.data["luck"], self.world.exact.index[state]])
        rng = np.random.Generator(np.random.Philox(key))
        return LanguageMDPSession(self.world.exact, state, rng)

    def exact(self, split: str = "test") -> ExactWorld:
        """The process that starts in the split's pairs, each as likely as the others."""
        require_choice("split", split, tuple(SHARES))
        return self.world.exact.restricted(self.world.splits[split])

    def success(self, policy: Array, split: str = "test") -> float:
        """Exact success rate in [0, 1] of a policy.

        Args:
            policy: [S, A], rows in the order of ``exact().states``, columns in that of
                ``DIRECTIONS``; text that names no exit counts as any direction without one.
            split: whose tasks.
        """
        return success_rate(self.exact(split).mdp, policy)

    def baselines(self, split: str = "test") -> dict[str, float]:
        """Exact success rates of policies that need no learning, and of the optimal one."""
        return self.exact(split).baselines()

    @staticmethod
    def vocabulary() -> list[str]:
        """Every word and mark of any text of any level and seed, for a word-level tokenizer."""
        return vocabulary()
