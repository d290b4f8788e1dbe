"""Rollouts that leave a stored episode: the same state, the given action, then the policy."""

from __future__ import annotations

from collections import Counter

import pytest

from nlac_lightning import models
from nlac_lightning.actors import OracleActor
from nlac_lightning.envs.base import Task, TextEnv
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.forks import Fork, ForkedRollout
from nlac_lightning.futures import Futures, rollout_fields
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

DESK = HelpDeskEnv(level=0, n_train=2)


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="plain")
    return Roles(config, models.load_tokenizer(smollm2_path))


def solve(env: TextEnv, roles: Roles, task: Task, seed: int = 3) -> Episode:
    rollout = Rollout(env, roles, RolloutLimits())
    return next(rollout.play([(task, seed)], OracleActor(roles.codec)))


def test_a_fork_with_the_stored_action_repeats_the_episode(roles: Roles) -> None:
    task = DESK.tasks("train")[0]
    stored = solve(DESK, roles, task)
    end = stored.state_ids(len(stored.turns))
    forks = [
        Fork(task, state, roles.codec.given(state.turn.action), 100 + state.t)
        for state in stored.transitions()
    ]
    rollout = ForkedRollout(DESK, roles, RolloutLimits())
    played = sorted(rollout.branch(forks, OracleActor(roles.codec)), key=lambda e: e.seed)
    assert [episode.seed for episode in played] == [fork.seed for fork in forks]
    for t, episode in enumerate(played):
        assert episode.opening_ids == stored.state_ids(t)
        assert episode.opening == stored.state_messages(t)
        assert len(episode.turns) == len(stored.turns) - t
        assert episode.state_ids(len(episode.turns)) == end
        assert episode.total_reward == stored.total_reward == 1.0


def test_a_fork_takes_its_own_action_and_counts_the_turns_before(roles: Roles) -> None:
    task = DESK.tasks("train")[0]
    state = solve(DESK, roles, task).transition(2)
    rollout = ForkedRollout(DESK, roles, RolloutLimits(max_turns=4))
    fork = Fork(task, state, roles.codec.given("nonsense"), 0)
    (episode,) = rollout.branch([fork], OracleActor(roles.codec))
    assert [turn.action for turn in episode.turns] == ["nonsense", state.turn.action]
    assert episode.turns[0].info["error"] and not episode.turns[1].info.get("error")
    assert episode.reason == "step_limit"


def test_futures_differ_by_the_environments_chance(roles: Roles) -> None:
    env = LanguageMDPEnv(level=1)
    survival = env.world.exact.world.survival
    task = env.tasks("train")[0]
    state = solve(env, roles, task).transition(0)
    away = roles.codec.given("nowhere")  # no exit: only chance can end the walk here
    forks = [Fork(task, state, away, seed) for seed in range(300)]
    rollout = ForkedRollout(env, roles, RolloutLimits(max_turns=1, parallel=300))
    ended = [e.turns[0].terminated for e in rollout.branch(forks, OracleActor(roles.codec))]
    share, spread = 1 - survival, (survival * (1 - survival) / 300) ** 0.5
    assert abs(sum(ended) / 300 - share) < 4 * spread


def test_template_fields_tell_what_followed(roles: Roles) -> None:
    stored = solve(DESK, roles, DESK.tasks("train")[0])
    fields = rollout_fields([stored])
    assert fields["returns"] == [1.0]
    assert fields["replies"] == [" ".join(m["content"] for m in stored.turns[0].replies)]
    (text,) = fields["rollouts"]
    for t, turn in enumerate(stored.turns):
        assert (f"Agent: {turn.action}" in text) == (t > 0), "the first action is a field already"
        assert all(m["content"] in text for m in turn.replies)
    assert text.endswith("reward 1")


def test_tasks_of_another_environment_are_refused(roles: Roles) -> None:
    state = solve(DESK, roles, DESK.tasks("train")[1]).transition(0)
    given = [roles.codec.given("x")]
    for env in (None, HelpDeskEnv(level=0, n_train=1)):
        futures = Futures(env, roles, None, 2, RolloutLimits(), Counter())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"data\.env"):
            futures.play([state], given, 0)
