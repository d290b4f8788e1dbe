"""Playing tasks with a policy, and asking the critic about what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nlac_lightning.actors import Actor, ModelActor
from nlac_lightning.critic import Critic
from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.errors import ConfigError, require_positive
from nlac_lightning.evaluation.records import EpisodeRecord, StepRecord
from nlac_lightning.evaluation.reflexion import LessonsEnv, Reflects, add_lessons
from nlac_lightning.generation.base import Generator
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.roles.roles import Roles
from nlac_lightning.rollout import Rollout, RolloutLimits


@dataclass
class EvaluationConfig:
    """How a policy is evaluated."""

    temperature: float | None = 0.0
    """Temperature of the policy while it is tested; null keeps the one it is trained with."""
    critic_steps: int = 128
    """Steps, chosen evenly from all episodes, on which the critic and the refiner are tested."""
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    """Bounds of an episode."""
    retries: int = 0
    """With ``nlac test``: further tries of failed tasks, each after a reflection on the last one
    (Reflexion). They are reported as policies of their own, ``NAME_retry1`` and so on."""
    seed: int = 1000
    """Seed of the episodes; base and trained policy meet the same ones."""
    trials: int = 1
    """Episodes of each task, with seeds that count on from ``seed``; with more than one, pass^k and
    pass@k are reported up to this k. They differ only if policy, user or environment draw."""

    def __post_init__(self) -> None:
        require_positive("model.evaluation.critic_steps", self.critic_steps, zero=True)
        require_positive("model.evaluation.trials", self.trials)
        require_positive("model.evaluation.retries", self.retries, zero=True)
        if self.retries and self.trials > 1:
            raise ConfigError(
                "model.evaluation.retries",
                "a task of several trials has no one failure",
                "set trials: 1",
            )


class Evaluator:
    """Evaluates policies in one environment.

    Args:
        env, roles, generator: where and with what. Without a generator every actor is given.
        critic: whose fidelity is measured; None measures none.
        config: see :class:`EvaluationConfig`.
    """

    def __init__(
        self,
        env: TextEnv,
        roles: Roles,
        generator: Generator | None,
        critic: Critic | None,
        config: EvaluationConfig,
    ) -> None:
        self.env, self.roles, self.generator = env, roles, generator
        self.critic, self.config = critic, config

    def play(
        self,
        tasks: Sequence[Task],
        adapter: str,
        policy: str,
        progress: Callable[[int], None] = lambda done: None,
        actor: Actor | None = None,
    ) -> list[EpisodeRecord]:
        """Play every task ``config.trials`` times and record each step.

        Args:
            tasks: what to play.
            adapter: ``online`` or ``base``, for the policy.
            policy: label of the records.
            progress: called with 1 at the end of each episode.
            actor: plays instead of the model.
        """
        if actor is None:
            assert self.generator is not None
            actor = ModelActor(self.roles, self.generator, adapter, self.config.temperature)
        return self._records(tasks, self._episodes(self.env, tasks, actor, progress), policy)

    def play_with_retries(
        self, tasks: Sequence[Task], policy: str, actor: Actor
    ) -> Iterator[tuple[str, list[EpisodeRecord]]]:
        """Play every task, then what failed up to ``retries`` times more with lessons.

        Yields the policy's label with its records, then for each retry ``LABEL_retryN`` with the
        last episode of every task so far. An actor that cannot reflect retries nothing.
        """
        episodes = self._episodes(self.env, tasks, actor)
        records = self._records(tasks, episodes, policy)
        yield policy, records
        if not isinstance(actor, Reflects):
            return
        lessons: dict[str, list[str]] = {}
        by_id = {task.id: task for task in tasks}
        for retry in range(1, self.config.retries + 1):
            failed = [e for e in episodes if e.total_reward <= 0]
            add_lessons(lessons, failed, actor, self.config.seed)
            again = [by_id[e.task_id] for e in failed]
            episodes = self._episodes(LessonsEnv(self.env, lessons), again, actor)
            label = f"{policy}_retry{retry}"
            last = {record.task_id: record for record in self._records(tasks, episodes, label)}
            records = [last.get(r.task_id, replace(r, policy=label)) for r in records]
            yield label, records

    def _episodes(
        self,
        env: TextEnv,
        tasks: Sequence[Task],
        actor: Actor,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Episode]:
        rollout = Rollout(env, self.roles, self.config.limits)
        trials = range(self.config.trials)
        jobs = [(task, self.config.seed + trial) for task in tasks for trial in trials]
        order = {(task.id, seed): i for i, (task, seed) in enumerate(jobs)}
        played = rollout.play(jobs, actor, progress)
        return sorted(played, key=lambda e: order[e.task_id, e.seed])

    def _records(
        self, tasks: Sequence[Task], episodes: list[Episode], policy: str
    ) -> list[EpisodeRecord]:
        facts = {task.id: self.env.facts(task) for task in tasks}
        steps = [[_step(turn) for turn in episode.turns] for episode in episodes]
        self._criticise(episodes, steps)
        return [
            EpisodeRecord(
                task_id=episode.task_id,
                split=episode.split,
                policy=policy,
                success=episode.total_reward > 0,
                total_reward=episode.total_reward,
                steps=records,
                reason=episode.reason,
                tokens=sum(len(turn.logprobs) for turn in episode.turns),
                opening=episode.opening,
                facts=facts[episode.task_id],
            )
            for episode, records in zip(episodes, steps, strict=True)
        ]

    def _criticise(self, episodes: list[Episode], steps: list[list[StepRecord]]) -> None:
        begun = [(e, episode) for e, episode in enumerate(episodes) if episode.opening]
        places = [(e, t) for e, episode in begun for t in range(len(episode.turns))]
        count = min(self.config.critic_steps, len(places))
        if not count or self.critic is None:
            return
        chosen = [places[i] for i in np.linspace(0, len(places) - 1, count).round().astype(int)]
        states = [episodes[e].transition(t) for e, t in chosen]
        actions = [state.turn.action for state in states]
        critiques = self.critic.learned(states, actions, self.config.seed)
        refined = self.critic.refine(states, actions, critiques, self.config.seed)
        for (e, t), state, critique, completion in zip(
            chosen, states, critiques, refined, strict=True
        ):
            action = self.roles.action(completion.text)
            # asking plays the state again; where the taken action had no truth, none has
            known = "oracle" in state.turn.info
            truth = self.critic.truth(state, action) if known else None
            steps[e][t] = replace(
                steps[e][t],
                critique=critique.text,
                description=" | ".join(critique.descriptions),
                verdict=critique.good,
                score=critique.score,
                refined_action=action,
                refined_right=truth.good if truth else None,
            )


def _step(turn: Turn) -> StepRecord:
    oracle = turn.info.get("oracle")
    return StepRecord(
        action=turn.action,
        completion=turn.completion,
        right=oracle["good"] if oracle else None,
        valid=bool(turn.info.get("valid", True)),
        explored=turn.explored,
        reply="\n".join(f"{m.get('name', m['role'])}: {m['content']}" for m in turn.replies),
        reward=turn.reward,
        tool_error=turn.info.get("tool_error") if turn.info.get("tool") else None,
    )
