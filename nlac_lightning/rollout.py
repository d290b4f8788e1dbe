"""Playing episodes: many at once, one generation call per round of turns.

Nothing that a model or an environment does stops a rollout. Each failure ends one episode, with a
reason that is stored and counted.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from nlac_lightning.actors import Actor, Live
from nlac_lightning.envs.base import Message, Step, Task, TextEnv
from nlac_lightning.errors import require_choice, require_positive
from nlac_lightning.generation.base import FAILED, TOO_LONG, Completion, EngineError
from nlac_lightning.interrupts import time_limit
from nlac_lightning.replay.episode import Episode, Turn
from nlac_lightning.roles.codec import clean
from nlac_lightning.roles.roles import Roles

log = logging.getLogger(__name__)

REASON = 200
"""Longest reason of an episode, in characters."""


@dataclass
class RolloutLimits:
    """When an episode is cut."""

    max_turns: int = 30
    """Actions per episode."""
    max_tokens: int = 8192
    """Tokens of a state; an episode that would act in a longer one is truncated."""
    max_seconds: float = 600.0
    """Wall-clock time of an episode, checked between turns."""
    call_seconds: float = 600.0
    """Wall-clock time of one reset or step of the environment, its user and tools included; what
    hangs longer is cut off and ends its episode (``reset_error``, ``env_error``)."""
    parallel: int = 32
    """Episodes that run side by side."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_seconds", "call_seconds", "parallel"):
            require_positive(f"rollout.limits.{name}", getattr(self, name))


@dataclass
class Exploration:
    """How rollouts leave the policy."""

    kind: Literal["none", "epsilon", "return"] = "none"
    """``epsilon``: now and then an action drawn from the environment's admissible ones, those that
    failed since the last success excepted. ``return`` does the same, but first goes back along the
    best actions found for the task so far (after Go-Explore, arXiv 1901.10995)."""
    epsilon: float = 0.5
    """Probability of such an action; 1 explores without the model and costs no generation."""
    tries: int = 3
    """With ``return``: turns after the way back, then the episode is cut (``explored``). Short
    episodes cost few tokens and hold many right actions."""

    def __post_init__(self) -> None:
        require_choice("rollout.exploration.kind", self.kind, ("none", "epsilon", "return"))
        require_positive("rollout.exploration.epsilon", self.epsilon, zero=True)
        require_positive("rollout.exploration.epsilon", 1 - self.epsilon, zero=True)
        require_positive("rollout.exploration.tries", self.tries)


class Rollout:
    """Plays episodes of one environment.

    Args:
        env: the environment.
        roles: how messages become ids and where the action is in a completion.
        limits: see :class:`RolloutLimits`.
        exploration: see :class:`Exploration`.

    Attributes:
        counts: episodes by reason, turns, invalid and cut-off actions, failures.
        paths: for ``return``, the best actions found for each task.
    """

    def __init__(
        self,
        env: TextEnv,
        roles: Roles,
        limits: RolloutLimits,
        exploration: Exploration | None = None,
        paths: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.env, self.roles, self.limits = env, roles, limits
        self.paths = {} if paths is None else paths
        self.exploration = exploration or Exploration()
        self.counts: Counter[str] = Counter()

    def play(
        self,
        jobs: Sequence[tuple[Task, int]],
        actor: Actor,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Iterator[Episode]:
        """Play each (task, seed) once; episodes come as they end."""
        return self._play([partial(self._start, *job) for job in jobs], actor, progress)

    def _play(
        self,
        starts: Sequence[Callable[[], Live | Episode | None]],
        actor: Actor,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Iterator[Episode]:
        waiting = list(reversed(starts))
        live: list[Live] = []
        while waiting or live:
            while waiting and len(live) < self.limits.parallel:
                started = waiting.pop()()
                if isinstance(started, Live):
                    live.append(started)
                elif started is not None:
                    progress(1)
                    yield started
            if not live:
                break
            for run, completion, explored in self._choose(live, actor):
                self._advance(run, completion, explored, actor.version)
            for run in [run for run in live if self._over(run)]:
                live.remove(run)
                self._close(run)
                if self.exploration.kind == "return":
                    remember_path(self.paths, run.task.id, run.turns)
                progress(1)
                yield self._episode(run)

    def _start(self, task: Task, seed: int) -> Live | Episode:
        try:
            with time_limit(self.limits.call_seconds):
                session = self.env.reset(task, seed)
                opening = checked_messages(session.opening)
        except Exception as error:
            self.counts["reset_error"] += 1
            log.warning("task %s could not be started: %s", task.id, error)
            return self._never_begun(task, seed, error)
        ids = self.roles.codec.messages(opening)
        key = np.random.SeedSequence([seed, *task.id.encode()])
        rng = np.random.Generator(np.random.Philox(key))
        path = self.paths.get(task.id, ()) if self.exploration.kind == "return" else ()
        if path and rng.random() < 0.5:  # every stage of the way is explored, its end most often
            path = path[: int(rng.integers(len(path)))]
        now = time.monotonic()
        return Live(task, seed, session, ids, ids, list(opening), rng, now, opening, path)

    def _never_begun(self, task: Task, seed: int, error: Exception) -> Episode:
        """The record of an episode that could not be started: no state, an empty action."""
        info = {"reason": "reset_error", "error": f"{type(error).__name__}: {error}"}
        turn = Turn("", "", (), 0, 0, (), "given", 0, False, [], 0.0, False, True, info)
        codec = self.roles.codec.fingerprint
        self.counts["episodes"] += 1
        self.counts["end/reset_error"] += 1
        return Episode(
            self.env.name, task.id, task.split, seed, codec, [], (), [turn], "reset_error"
        )

    def _choose(self, live: list[Live], actor: Actor) -> list[tuple[Live, Completion, bool]]:
        chosen: list[tuple[Live, Completion, bool]] = []
        modelled: list[Live] = []
        for run in live:
            if run.first is not None and not run.turns:
                chosen.append((run, run.first, False))
                continue
            action = self._explore(run)
            if action is None:
                modelled.append(run)
            else:
                chosen.append((run, self.roles.codec.given(action), True))
        if modelled:
            try:
                completions = actor.act(modelled)
            except (EngineError, OSError) as error:  # a worker that died, a lost connection
                log.warning("no actions could be had: %s", error)
                why = f"{type(error).__name__}: {error}"
                completions = [Completion((), why, (), FAILED)] * len(modelled)
            chosen += [(r, c, False) for r, c in zip(modelled, completions, strict=True)]
        return chosen

    def _explore(self, run: Live) -> str | None:
        options = self.exploration
        if len(run.turns) < len(run.path):
            return run.path[len(run.turns)]
        if options.kind == "none" or run.rng.random() >= options.epsilon:
            return None
        try:
            with time_limit(self.limits.call_seconds):
                candidates = list(run.session.admissible())
        except Exception as error:
            log.warning("task %s lists no actions: %s", run.task.id, error)
            return None
        failed = set()
        for turn in reversed(run.turns):
            if not turn.info.get("error"):
                break
            failed.add(turn.action)
        fresh = [action for action in candidates if action not in failed] or candidates
        return fresh[int(run.rng.integers(len(fresh)))] if fresh else None

    @staticmethod
    def _tried(run: Live) -> int:
        return len(run.turns) - len(run.path)

    def _advance(self, run: Live, completion: Completion, explored: bool, version: int) -> None:
        codec = self.roles.codec
        if completion.finish_reason == TOO_LONG and run.turns:
            return _cut(run, "token_limit")
        if completion.finish_reason == TOO_LONG:  # the task alone is longer than the model's reach
            action, step = "", _no_action("no position is left for an action", "token_limit")
        elif completion.finish_reason == FAILED:
            action, step = "", _no_action(completion.text, "policy_failed")
            completion = Completion((), "", (), FAILED)
        else:
            action = completion.text if explored else self.roles.action(completion.text)
            step = self._step(run, action)
        head = codec.header()
        sampled = head + completion.ids
        delta = sampled + codec.close(completion) + codec.messages(step.messages)
        turn = Turn(
            action=action,
            completion=completion.text.strip(),
            delta_ids=delta,
            action_start=len(head),
            action_end=len(sampled),
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason if completion.logprobs else "given",
            policy_version=version,
            explored=explored,
            replies=list(step.messages),
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
            info=dict(step.info),
        )
        run.turns.append(turn)
        run.state_ids += delta
        run.messages += [{"role": "assistant", "content": turn.completion}, *step.messages]
        self.counts["turns"] += 1
        self.counts["invalid"] += not step.info.get("valid", True)
        self.counts["cut_off"] += not completion.complete
        self.counts["explored"] += explored

    def _step(self, run: Live, action: str) -> Step:
        try:
            with time_limit(self.limits.call_seconds):
                oracle = run.session.oracle_critique(action)
                step = run.session.step(action)
            messages = checked_messages(step.messages)
            if oracle is not None:
                truth = {"good": oracle.good, "text": oracle.text(), "action": oracle.action}
                step = replace(step, info={**step.info, "oracle": truth})
            info = dict(step.info)
            json.dumps([messages, info])
            if not math.isfinite(step.reward):
                raise ValueError(f"reward {step.reward}")
            return replace(step, messages=messages, reward=float(step.reward), info=info)
        except Exception as error:
            log.warning("task %s failed in step %d: %s", run.task.id, len(run.turns), error)
            reason = {"reason": "env_error", "error": f"{type(error).__name__}: {error}"}
            return Step([], truncated=True, info=reason)

    def _close(self, run: Live) -> None:
        try:
            with time_limit(self.limits.call_seconds):
                run.session.close()
        except Exception as error:
            log.warning("task %s could not be closed: %s", run.task.id, error)

    def _over(self, run: Live) -> bool:
        last = run.turns[-1]
        if last.terminated or last.truncated:
            return True
        limit = None
        if run.before + len(run.turns) >= self.limits.max_turns:
            limit = "step_limit"
        elif len(run.state_ids) >= self.limits.max_tokens:
            limit = "token_limit"
        elif self.exploration.kind == "return" and self._tried(run) >= self.exploration.tries:
            limit = "explored"
        elif time.monotonic() - run.started > self.limits.max_seconds:
            limit = "time_limit"
        if limit:
            _cut(run, limit)
        return limit is not None

    def _episode(self, run: Live) -> Episode:
        reason = clean(str(run.turns[-1].info.get("reason", "done")))[:REASON]
        self.counts[f"end/{reason}"] += 1
        self.counts["episodes"] += 1
        return Episode(
            env=self.env.name,
            task_id=run.task.id,
            split=run.task.split,
            seed=run.seed,
            codec=self.roles.codec.fingerprint,
            opening=run.opening,
            opening_ids=run.opening_ids,
            turns=run.turns,
            reason=reason,
        )


def remember_path(paths: dict[str, tuple[str, ...]], task_id: str, turns: Sequence[Turn]) -> None:
    """Keep the longest way without errors; give up the last step of one that led nowhere.

    Args:
        paths: best actions of each task, changed in place.
        turns: of an episode of the task that has ended.
    """
    last = turns[-1]
    way = tuple(turn.action for turn in turns if not turn.info.get("error"))
    best = paths.get(task_id, ())
    if last.terminated and sum(turn.reward for turn in turns) <= 0 and way[-1:] == (last.action,):
        paths[task_id] = best[:-1] if best == way[: len(best)] else best
    elif len(way) > len(best):
        paths[task_id] = way


def _cut(run: Live, reason: str) -> None:
    """End an episode with the last action that was taken."""
    last = run.turns[-1]
    run.turns[-1] = replace(last, truncated=True, info={**last.info, "reason": reason})


def _no_action(why: str, reason: str) -> Step:
    """The last step of an episode whose policy could not answer (an endpoint that is down)."""
    return Step([], truncated=True, info={"valid": False, "error": why, "reason": reason})


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages of an environment as a list; TypeError if one has no role or no text."""
    for message in messages:
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise TypeError("a message of the environment has no role or no text")
    return list(messages)
