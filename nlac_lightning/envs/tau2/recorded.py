"""Recorded conversations of the original tau-bench, played again in tau2's environment.

What was said and called is taken from the recording, what the tools answer from tau2, and the
reward from tau2's rules with the recorded gold actions, so that the transitions are those that an
agent would meet here. A recorded run holds ``task_id``, ``trial``, ``reward``, ``traj`` (OpenAI
messages) and ``info`` with the task.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nlac_lightning.actors import Live
from nlac_lightning.envs.base import Step, Task, TextEnv
from nlac_lightning.envs.tau2.actions import Call
from nlac_lightning.envs.tau2.env import Tau2Env
from nlac_lightning.envs.tau2.session import Tau2Session
from nlac_lightning.envs.tau2.tasks import TauTask, from_tau_bench
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import Roles
from nlac_lightning.rollout import Rollout, RolloutLimits
from nlac_lightning.users.base import UserReply, UserSession, UserTask

STOP = "###STOP###"


@dataclass(frozen=True)
class Said:
    """One recorded action: a call or a message, and the thought before it."""

    what: Call | str
    thought: str = ""


@dataclass(frozen=True)
class Run:
    """One recorded conversation.

    Attributes:
        id: unique in its file.
        task: what it was about.
        user_turns: what the user said; a turn with ``###STOP###`` ends the dialogue.
        actions: what the agent did.
        reward: as recorded.
    """

    id: str
    task: TauTask
    user_turns: tuple[str, ...]
    actions: tuple[Said, ...]
    reward: float


def read_runs(path: str | Path, env: Tau2Env) -> list[Run]:
    """Runs of a tau-bench result file (JSON, may be gzipped).

    Raises:
        ConfigError: no such file, or not a list of runs; the message names the entry.
    """
    fix = "give a result file of tau-bench: a JSON list of runs with task_id, reward, traj, info"
    try:
        raw = Path(path).read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        records = json.loads(text)
        if not isinstance(records, list):
            raise ValueError("not a list")
    except (OSError, ValueError, EOFError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", fix) from error
    runs = []
    for number, record in enumerate(records):
        try:
            runs.append(_run(record, number, env))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"entry {number} is not a recorded run ({type(error).__name__}: {error})"
            raise ConfigError(str(path), problem, fix) from error
    return runs


def _run(record: dict[str, Any], number: int, env: Tau2Env) -> Run:
    run_id = f"tau-bench-{record['task_id']}-{record.get('trial', 0)}-{number}"
    domain = env.domain
    task = from_tau_bench(record["info"]["task"], run_id, domain.name, sorted(domain.parameters))
    turns, actions, thought = [], [], ""
    for message in record["traj"]:
        content = message.get("content") or ""
        if message["role"] == "user":
            turns.append(content)
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or []
        if not calls:
            actions.append(Said(content, thought))
            thought = ""
            continue
        thought = f"{thought} {content}".strip()
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "think":  # no tool here: it is what a thought is for
                thought = f"{thought} {arguments.get('thought', '')}".strip()
                continue
            actions.append(Said(Call(call["function"]["name"], arguments), thought))
            thought = ""
    if not turns or not actions:
        raise ValueError("no words of the user, or no action")
    return Run(run_id, task, tuple(turns), tuple(actions), float(record["reward"]))


class RecordedUser:
    """A user who says again what was recorded, whatever the agent says."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = turns

    def start(self, task: UserTask, seed: int) -> UserSession:
        """Begin from the first turn."""
        return RecordedUserSession(self.turns)


class RecordedUserSession:
    """One run through the recorded turns."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._left = list(turns)

    def open(self) -> UserReply:
        """The first turn."""
        return self.reply("")

    def reply(self, agent_message: str) -> UserReply:
        """The next turn; a failure when the recording has no more."""
        if not self._left:
            return UserReply("", failed="the recording has no further turn of the user")
        text = self._left.pop(0)
        return UserReply(text.replace(STOP, "").strip(), stop=STOP in text)

    def close(self) -> None:
        """Nothing is held."""


class RecordedSession(Tau2Session):
    """Ends, as truncated, where the recording does."""

    actions_left: int

    def step(self, action: str) -> Step:
        """As always, until nothing more is recorded."""
        step = super().step(action)
        self.actions_left -= 1
        if step.terminated or self.actions_left:
            return step
        return replace(step, truncated=True, info=step.info | {"reason": "recording_ends"})


class RecordedEnv(TextEnv):
    """Recorded runs as tasks of the environment that they are imported into."""

    def __init__(self, env: Tau2Env, runs: Sequence[Run]) -> None:
        self.env, self.name = env, env.name
        self.runs = {run.id: run for run in runs}

    def tasks(self, split: str) -> Sequence[Task]:
        """All runs, as training tasks."""
        return [Task(run.id, "train") for run in self.runs.values()] if split == "train" else []

    def reset(self, task: Task, seed: int = 0) -> RecordedSession:
        """Start a recorded dialogue."""
        run = self.runs[task.id]
        user = RecordedUser(run.user_turns).start(run.task.user, seed)
        view = replace(self.env.view, transfer_ends=True)
        session = RecordedSession(self.env.domain, run.task, user, view)
        session.actions_left = len(run.actions)
        return session


class RecordedActor:
    """Acts as recorded."""

    version = 0

    def __init__(self, roles: Roles, env: RecordedEnv) -> None:
        self.roles, self.env = roles, env

    def act(self, states: Sequence[Live]) -> list[Completion]:
        return [self._act(live) for live in states]

    def _act(self, live: Live) -> Completion:
        said = self.env.runs[live.task.id].actions[len(live.turns)]
        style = self.env.env.view.style
        action = said.what if isinstance(said.what, str) else said.what.text(style)
        return self.roles.completion(action, said.thought)


def episodes(recorded: RecordedEnv, roles: Roles) -> Iterator[Episode]:
    """Play all runs again; each episode's last ``info`` holds its ``recorded_reward``."""
    recorded.env.meet(roles.codec.chat_template)
    longest = max((len(run.actions) for run in recorded.runs.values()), default=1)
    limits = RolloutLimits(max_turns=longest, max_tokens=10**9, max_seconds=1e9)
    rollout = Rollout(recorded, roles, limits)
    jobs = [(task, 0) for task in recorded.tasks("train")]
    for episode in rollout.play(jobs, RecordedActor(roles, recorded)):
        last = episode.turns[-1]
        info = last.info | {"recorded_reward": recorded.runs[episode.task_id].reward}
        episode.turns[-1] = replace(last, info=info)
        yield episode
