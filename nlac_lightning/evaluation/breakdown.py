"""Success by groups of tasks and over several trials of each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult
from nlac_lightning.metrics import Interval, wilson_interval

MANY_WRITES = 3
"""Tasks with so many gold writes or more are one group."""


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate, from ``n`` trials of a task, that ``k`` trials all succeed.

    C(c, k) / C(n, k). Source: tau-bench, arXiv 2406.12045, section 3.
    """
    return math.comb(successes, k) / math.comb(n, k)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate, from ``n`` trials of a task, that one of ``k`` succeeds.

    1 - C(n - c, k) / C(n, k). Source: arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def breaks_down(result: EvaluationResult) -> bool:
    """Whether a result has groups or repeated trials to report."""
    tasks = {episode.task_id for episode in result.episodes}
    return len(tasks) < len(result.episodes) or any(e.facts for e in result.episodes)


def breakdown(result: EvaluationResult) -> dict[str, Any]:
    """What a result says by group, as JSON-serialisable values; nan becomes None.

    ``env``, ``split``; ``groups``: for each group of tasks ``tasks``, ``episodes``, ``success``,
    ``low``, ``high`` (95%); ``pass^k`` and ``pass@k``: means over tasks for each k up to the
    smallest number of trials; ``mean_turns``; ``tool_error_rate`` (of tool calls) and
    ``invalid_rate`` (of actions); ``user_failures`` (episodes in which no reply could be had from
    the user: they count as failures).
    """
    episodes = result.episodes
    steps = [step for _, step in result.steps()]
    tool_errors = [step.tool_error for step in steps if step.tool_error is not None]
    trials = _trials(episodes)
    most = min(map(len, trials), default=0)
    ks = range(1, most + 1)
    return {
        "env": result.env,
        "split": result.split,
        "groups": {
            name: _group([e for e in episodes if belongs(e)])
            for name, belongs in (GROUPS | _levels(episodes)).items()
            if any(map(belongs, episodes))
        },
        "pass^k": {str(k): _over_tasks(pass_hat_k, trials, k) for k in ks},
        "pass@k": {str(k): _over_tasks(pass_at_k, trials, k) for k in ks},
        "mean_turns": _mean([float(len(e.steps)) for e in episodes]),
        "tool_error_rate": _mean([float(error) for error in tool_errors]),
        "invalid_rate": _mean([float(not step.valid) for step in steps]),
        "user_failures": sum(e.reason == "user_failed" for e in episodes),
    }


def _has_mask(name: str) -> Callable[[EpisodeRecord], bool]:
    return lambda episode: name in episode.facts.get("masks", ())


def _has_writes(number: int) -> Callable[[EpisodeRecord], bool]:
    if number == MANY_WRITES:
        return lambda episode: episode.facts.get("gold_writes", -1) >= number
    return lambda episode: episode.facts.get("gold_writes") == number


def _has_level(level: float) -> Callable[[EpisodeRecord], bool]:
    return lambda episode: episode.facts.get("level") == level


def _levels(episodes: Sequence[EpisodeRecord]) -> dict[str, Callable[[EpisodeRecord], bool]]:
    """A group for each difficulty that tasks have, from easy to hard."""
    levels = sorted({e.facts["level"] for e in episodes if "level" in e.facts})
    return {f"level {level:g}": _has_level(level) for level in levels}


GROUPS: dict[str, Callable[[EpisodeRecord], bool]] = {
    "all tasks": lambda episode: True,
    "where something has to be done": lambda episode: (
        "masks" in episode.facts and not _has_mask("do_nothing")(episode)
    ),
    "solved by doing nothing": _has_mask("do_nothing"),
    **{f"{n} gold writes": _has_writes(n) for n in range(MANY_WRITES)},
    f"{MANY_WRITES} or more gold writes": _has_writes(MANY_WRITES),
    "order-sensitive": _has_mask("order_sensitive"),
    "known bad gold": _has_mask("known_bad_gold"),
    "gold write refused": _has_mask("gold_error"),
}
"""Groups of episodes by what is known of their tasks; a task may be in several."""


def _trials(episodes: Sequence[EpisodeRecord]) -> list[list[bool]]:
    by_task: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        by_task[episode.task_id].append(episode.success)
    return list(by_task.values())


def _group(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    trials = _trials(episodes)
    interval = _interval(trials)
    return {
        "tasks": len(trials),
        "episodes": len(episodes),
        **{
            name: _number(value)
            for name, value in zip(("success", "low", "high"), interval, strict=True)
        },
    }


def _interval(trials: Sequence[Sequence[bool]]) -> Interval:
    """Wilson's interval with one observation per task: trials of a task are not independent.

    With several trials a task's share of successes varies less than one trial does, so the
    interval is then wider than it had to be.
    """
    return wilson_interval(sum(fmean(trial) for trial in trials), len(trials))


def _over_tasks(
    estimate: Callable[[int, int, int], float], trials: Sequence[Sequence[bool]], k: int
) -> float:
    return fmean(estimate(len(trial), sum(trial), k) for trial in trials)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
