"""Real futures of an action: the policy plays on from a stored state, several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nlac_lightning.actors import ModelActor
from nlac_lightning.envs.base import TextEnv
from nlac_lightning.envs.replay import tasks_by_id
from nlac_lightning.errors import ConfigError
from nlac_lightning.forks import Fork, ForkedRollout
from nlac_lightning.generation.base import Completion, Generator
from nlac_lightning.replay.episode import Episode, Transition
from nlac_lightning.roles.roles import Roles
from nlac_lightning.rollout import RolloutLimits


class Futures:
    """On-policy rollouts from state-actions, by replaying the stored episode up to the state.

    Args:
        env: whose episodes are stored; equal seeds and actions must give equal answers there.
        roles, generator: the policy.
        n: rollouts of each state-action.
        limits: bounds of an episode, the turns before the fork included.
        counts: ``branch_episodes`` and ``branch_turns`` are added to it.
    """

    def __init__(
        self,
        env: TextEnv | None,
        roles: Roles,
        generator: Generator,
        n: int,
        limits: RolloutLimits,
        counts: Counter[str],
    ) -> None:
        self.env, self.roles, self.generator = env, roles, generator
        self.n, self.limits, self.counts = n, limits, counts

    def play(
        self, states: Sequence[Transition], actions: Sequence[Completion], seed: int
    ) -> list[list[Episode]]:
        """Rollouts a, r, s', a' ~ pi, ... of each state-action; each begins with the action.

        Fewer than ``n`` where the environment failed.

        Raises:
            ConfigError: no environment, or one that does not know a stored task.
        """
        if self.env is None:
            raise ConfigError("data.env", "no environment to play on in", "set data.env")
        tasks = tasks_by_id(self.env)
        forks = []
        for i, (state, action) in enumerate(zip(states, actions, strict=True)):
            task = tasks.get((state.split, state.task_id))
            if task is None:
                raise ConfigError(
                    "data.env",
                    f"it has no task '{state.task_id}', which the buffer holds",
                    "use the settings with which the buffer was filled",
                )
            forks += [Fork(task, state, action, seed + i * self.n + j) for j in range(self.n)]
        rollout = ForkedRollout(self.env, self.roles, self.limits)
        actor = ModelActor(self.roles, self.generator)
        played = sorted(rollout.branch(forks, actor), key=lambda episode: episode.seed)
        self.counts["branch_episodes"] += len(played)
        self.counts["branch_turns"] += rollout.counts["turns"]
        self.counts["branch_failed"] += len(forks) - len(played)
        futures: list[list[Episode]] = [[] for _ in states]
        for episode in played:
            futures[(episode.seed - seed) // self.n].append(episode)
        return futures


def rollout_fields(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Template fields of rollouts from one state-action.

    ``rollouts``: each as a text of replies and actions, thoughts left out; ``returns``: the sum of
    rewards of each; ``replies``: what directly answered the action in each.
    """
    return {
        "rollouts": [_text(episode) for episode in episodes],
        "returns": [episode.total_reward for episode in episodes],
        "replies": [
            " ".join(message["content"] for message in episode.turns[0].replies)
            for episode in episodes
        ],
    }


def _text(episode: Episode) -> str:
    lines = []
    for t, turn in enumerate(episode.turns):
        if t:
            lines.append(f"Agent: {turn.action}")
        lines += [f"{m.get('name', m['role'].capitalize())}: {m['content']}" for m in turn.replies]
    lines.append(f"Ending: {episode.reason}, reward {episode.total_reward:g}")
    return "\n".join(lines)
