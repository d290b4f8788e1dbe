"""Rollouts: limits, failures, exploration, and ids that chain from state to state."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from nlac_lightning import models
from nlac_lightning.actors import Live, ModelActor, OracleActor
from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.envs.base import Session, Step, Task, TextEnv
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import RoleConfig, Roles, RolesConfig
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits, remember_path

OPTIONS = ("left", "right", "up", "down")


class Desk(TextEnv):
    """Answers by a function of (task id, turn, action); closed sessions are counted."""

    name = "desk"

    def __init__(self, answer: Callable[[str, int, str], Step] | None = None) -> None:
        self.answer = answer or (lambda task, turn, action: Step(self.reply(turn)))
        self.open = 0

    @staticmethod
    def reply(turn: int) -> list[Any]:
        return [{"role": "user", "content": f"reply {turn}"}]

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{n}", split) for n in range(6)]

    def reset(self, task: Task, seed: int = 0) -> Session:
        if task.id.endswith("broken"):
            raise RuntimeError("no such customer")
        self.open += 1
        return DeskSession(self, task)


class DeskSession(Session):
    def __init__(self, env: Desk, task: Task) -> None:
        self.env, self.task, self.turn = env, task, 0
        self.opening = [{"role": "user", "content": f"hello from {task.id}"}]

    def step(self, action: str) -> Step:
        self.turn += 1
        return self.env.answer(self.task.id, self.turn, action)

    def admissible(self) -> Sequence[str]:
        return OPTIONS

    def close(self) -> None:
        self.env.open -= 1


class Says:
    """An actor that says the same thing every time."""

    version = 7

    def __init__(self, roles: Roles, text: str = "left", reason: str = "stop") -> None:
        ids = roles.codec.text(f" {text}\n")
        self.completion = Completion(ids, f" {text}", (-0.5,) * len(ids), reason)
        self.batches: list[int] = []

    def act(self, states: Sequence[Live]) -> list[Completion]:
        self.batches.append(len(states))
        return [self.completion for _ in states]


def make_roles(path: str, **options: Any) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="plain", **options)
    return Roles(config, models.load_tokenizer(path))


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    return make_roles(smollm2_path)


def play(
    roles: Roles,
    env: TextEnv,
    actor: Any = None,
    exploration: Exploration | None = None,
    tasks: Sequence[Task] | None = None,
    **limits: Any,
) -> tuple[list[Episode], Rollout]:
    rollout = Rollout(env, roles, RolloutLimits(**({"max_turns": 4} | limits)), exploration)
    jobs = [(task, n) for n, task in enumerate(tasks or env.tasks("train"))]
    return list(rollout.play(jobs, actor or Says(roles))), rollout


def check_chain(episode: Episode) -> None:
    states = [episode.state_ids(t) for t in range(len(episode.turns) + 1)]
    assert states[0] == episode.opening_ids
    for t, (state, following) in enumerate(pairwise(states)):
        transition = episode.transition(t)
        assert transition.state_ids == state and transition.next_state_ids == following
        assert following == state + episode.turns[t].delta_ids


def test_the_limit_on_turns_truncates(roles: Roles) -> None:
    env = Desk()
    episodes, rollout = play(roles, env, max_turns=3)
    assert len(episodes) == 6 and env.open == 0
    for episode in episodes:
        assert episode.reason == "step_limit" and len(episode.turns) == 3
        assert [turn.truncated for turn in episode.turns] == [False, False, True]
        assert not any(turn.terminated for turn in episode.turns)
        check_chain(episode)
    assert rollout.counts["end/step_limit"] == rollout.counts["episodes"] == 6
    assert rollout.counts["turns"] == 18


def test_the_limit_on_tokens_truncates(roles: Roles) -> None:
    episodes, _ = play(roles, Desk(), max_turns=50, max_tokens=60)
    for episode in episodes:
        assert episode.reason == "token_limit" and episode.turns[-1].truncated
        sizes = [len(episode.state_ids(t)) for t in range(len(episode.turns) + 1)]
        assert all(size < 60 for size in sizes[:-1]) and sizes[-1] >= 60


def test_the_limit_on_seconds_truncates(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nlac_lightning.rollout.time.monotonic", lambda: now[0])

    def slow(task: str, turn: int, action: str) -> Step:
        now[0] += 4.0
        return Step([])

    episodes, _ = play(roles, Desk(slow), tasks=[Task("a", "train")], max_turns=99, max_seconds=10)
    assert [episode.reason for episode in episodes] == ["time_limit"]
    assert len(episodes[0].turns) == 3 and episodes[0].turns[-1].truncated


def test_a_model_that_says_nothing_for_ever_ends(roles: Roles) -> None:
    episodes, _ = play(roles, Desk(), Says(roles, ""), max_turns=5)
    assert {len(episode.turns) for episode in episodes} == {5}


def test_termination_is_the_environments_word(roles: Roles) -> None:
    def end(task: str, turn: int, action: str) -> Step:
        return Step([], 1.0, terminated=turn == 2, info={"reason": "solved"} if turn == 2 else {})

    episodes, rollout = play(roles, Desk(end), max_turns=2)
    for episode in episodes:
        assert episode.reason == "solved" and episode.total_reward == 2.0
        assert episode.turns[-1].terminated and not episode.turns[-1].truncated
    assert rollout.counts["end/solved"] == 6


def test_a_reset_that_raises_is_recorded_and_costs_that_episode_only(roles: Roles) -> None:
    env = Desk()
    tasks = [Task("broken", "train"), *env.tasks("train"), Task("2-broken", "train")]
    episodes, rollout = play(roles, env, tasks=tasks, parallel=2)
    assert sorted(e.task_id for e in episodes) == sorted(t.id for t in tasks)
    assert rollout.counts["reset_error"] == rollout.counts["end/reset_error"] == 2
    for episode in episodes:
        failed = episode.task_id.endswith("broken")
        assert (episode.reason == "reset_error") == failed
        if failed:
            assert not episode.opening and not episode.turns[0].action_ids
            assert "no such customer" in episode.turns[0].info["error"]


@pytest.mark.parametrize("where", ["step", "oracle_critique", "admissible", "close"])
def test_a_session_that_raises_ends_that_episode_only(
    roles: Roles, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    original = getattr(DeskSession, where)

    def fail(self: DeskSession, *args: Any) -> Any:
        if self.task.id == "train-1" and (self.turn == 1 or where == "close"):
            raise ValueError("database is down")
        return original(self, *args)

    monkeypatch.setattr(DeskSession, where, fail)
    episodes, rollout = play(roles, Desk(), exploration=Exploration("epsilon", 0.3))
    reasons = {episode.task_id: episode.reason for episode in episodes}
    assert len(reasons) == 6
    failed = reasons.pop("train-1")
    assert set(reasons.values()) == {"step_limit"}
    if where == "step":
        assert failed == "env_error" and rollout.counts["end/env_error"] == 1
        last = next(e for e in episodes if e.task_id == "train-1").turns[-1]
        assert last.truncated and not last.terminated and "database is down" in last.info["error"]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_never_reaches_training(roles: Roles, reward: float) -> None:
    def bad(task: str, turn: int, action: str) -> Step:
        return Step([], reward if task == "train-2" else 0.0)

    episodes, _ = play(roles, Desk(bad))
    assert len(episodes) == 6
    for episode in episodes:
        assert (episode.reason == "env_error") == (episode.task_id == "train-2")
        assert math.isfinite(episode.total_reward)


def test_invalid_and_cut_off_actions_are_counted(roles: Roles) -> None:
    def invalid(task: str, turn: int, action: str) -> Step:
        return Step([], info={"valid": turn % 2 == 0})

    _, rollout = play(roles, Desk(invalid), Says(roles, reason="length"), max_turns=4)
    assert rollout.counts["invalid"] == 12 and rollout.counts["cut_off"] == 24


def test_exploring_always_never_asks_the_model(roles: Roles) -> None:
    def refuse(task: str, turn: int, action: str) -> Step:
        return Step([], info={"error": "no"})

    actor = Says(roles)
    episodes, rollout = play(roles, Desk(refuse), actor, Exploration("epsilon", 1.0))
    assert not actor.batches and rollout.counts["explored"] == rollout.counts["turns"] == 24
    for episode in episodes:
        for turn in episode.turns:
            assert turn.explored and turn.logprobs == () and turn.finish_reason == "given"
            assert turn.action in OPTIONS and turn.action_ids
        assert len({turn.action for turn in episode.turns}) == 4, "what failed waits"
        check_chain(episode)
    assert len({tuple(t.action for t in e.turns) for e in episodes}) > 1


def test_returning_goes_back_along_the_best_way_and_explores_from_there(roles: Roles) -> None:
    """Only ``up`` moves on, three times; the way found grows until the task is solved."""

    def climb(task: str, turn: int, action: str) -> Step:
        height[0] = height[0] + 1 if action == "up" else height[0]
        done = height[0] == 3
        info = {} if action == "up" else {"error": "no way"}
        return Step([], float(done), terminated=done, info=info)

    paths: dict[str, tuple[str, ...]] = {}
    exploration = Exploration("return", 1.0, tries=2)
    grown, reasons = [], set()
    for seed in range(40):
        height = [0]
        rollout = Rollout(Desk(climb), roles, RolloutLimits(max_turns=9), exploration, paths)
        (episode,) = rollout.play([(Task("a", "train"), seed)], Says(roles))
        grown.append(len(paths.get("a", ())))
        reasons.add(episode.reason)
        assert all(turn.explored for turn in episode.turns)
        assert episode.turns[-1].terminated == (episode.total_reward > 0)
    assert grown == sorted(grown) and paths["a"] == ("up", "up", "up")
    assert reasons == {"explored", "done"}


def test_what_was_found_follows_from_the_stored_episodes(roles: Roles) -> None:
    env = HelpDeskEnv(level=0)
    jobs = [(task, seed) for seed, task in enumerate(env.tasks("train")[:8] * 20)]
    rollout = Rollout(env, roles, RolloutLimits(), Exploration("return", 1.0, tries=2))
    found: dict[str, tuple[str, ...]] = {}
    for episode in rollout.play(jobs, Says(roles)):
        remember_path(found, episode.task_id, episode.turns)
    assert found == rollout.paths and max(map(len, found.values())) > 2


def test_never_exploring_asks_the_model_every_time(roles: Roles) -> None:
    actor = Says(roles)
    episodes, rollout = play(roles, Desk(), actor, Exploration("epsilon", 0.0))
    assert rollout.counts["explored"] == 0 and actor.batches == [6] * 4, "one batch per round"
    for turn in (turn for episode in episodes for turn in episode.turns):
        assert not turn.explored and turn.action_ids == actor.completion.ids
        assert turn.logprobs == actor.completion.logprobs and turn.policy_version == 7


def test_seeds_decide_whatever_runs_beside(roles: Roles) -> None:
    exploration = Exploration("epsilon", 0.5)

    def actions(**options: Any) -> dict[str, list[str]]:
        episodes, _ = play(roles, Desk(), None, exploration, max_turns=8, **options)
        return {e.task_id: [turn.action for turn in e.turns] for e in episodes}

    together = actions()
    assert together == actions(parallel=1) == actions(parallel=4)
    assert len(set(map(tuple, together.values()))) > 1


def test_many_jobs_wait_for_a_free_place(roles: Roles) -> None:
    actor = Says(roles)
    episodes, _ = play(roles, Desk(), actor, parallel=4)
    assert len(episodes) == 6 and max(actor.batches) == 4


@pytest.mark.parametrize("kind", ["plain", "chat"])
@pytest.mark.parametrize("action", ["plain", "react"])
def test_the_ids_stored_are_the_ids_sampled(tiny_llama_path: str, kind: str, action: str) -> None:
    backbone = Backbone(BackboneConfig(tiny_llama_path, lora_r=2, dtype="float32"))
    sampling = Sampling(temperature=1.0, max_new_tokens=5)
    config = RolesConfig(
        templates="help_desk_small",
        format=kind,
        action=action,
        policy=RoleConfig(sampling=sampling),
    )
    roles = Roles(config, backbone.tokenizer)
    made: dict[tuple[int, ...], Completion] = {}

    class Recorder(InProcessGenerator):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            outs = super().generate(requests)
            made.update({r.ids: out for r, out in zip(requests, outs, strict=True)})
            return outs

    backbone.versions["online"] = 3
    env = HelpDeskEnv(level=0, n_train=3)
    actor = ModelActor(roles, Recorder(backbone))
    episodes, rollout = play(roles, env, actor, max_turns=3)
    assert sum(len(episode.turns) for episode in episodes) == len(made) == 9
    for episode in episodes:
        check_chain(episode)
        for t, turn in enumerate(episode.turns):
            sampled = made[episode.state_ids(t) + roles.codec.header()]
            assert turn.action_ids == sampled.ids and turn.logprobs == sampled.logprobs
            assert turn.finish_reason == sampled.finish_reason and turn.policy_version == 3
            assert turn.action == roles.action(sampled.text)
            assert "oracle" in turn.info
    assert rollout.counts["cut_off"] == sum(not out.complete for out in made.values())


def test_the_oracle_solves_real_tasks(roles: Roles) -> None:
    env = HelpDeskEnv(level=0, n_train=6)
    episodes, _ = play(roles, env, OracleActor(roles.codec), max_turns=8)
    for episode in episodes:
        assert episode.total_reward == 1.0 and episode.reason == "solved"
        assert all(turn.finish_reason == "given" for turn in episode.turns)


@pytest.mark.parametrize("name", ["max_turns", "max_tokens", "max_seconds", "parallel"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.limits\.{name}"):
        RolloutLimits(**{name: 0})


@pytest.mark.parametrize(
    "wrong", [{"kind": "greedy"}, {"epsilon": -0.1}, {"epsilon": 1.1}, {"tries": 0}]
)
def test_exploration_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.exploration\.{next(iter(wrong))}"):
        Exploration(**wrong)
