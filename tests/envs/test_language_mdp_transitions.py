"""Stored walks of the language MDP: transitions chain, and end as often as the solve says."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nlac_lightning.actors import OracleActor
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.solve import occupancy
from nlac_lightning.envs.language_mdp.world import TRAP
from nlac_lightning.replay.buffer import ReplayBuffer
from nlac_lightning.roles.roles import Roles, RolesConfig
from nlac_lightning.rollout import Exploration, Rollout, RolloutLimits

EPISODES = 300


@pytest.fixture(scope="module")
def env():
    return LanguageMDPEnv(1, n_train=48)


@pytest.fixture(scope="module")
def transitions(env, tmp_path_factory):
    """Uniform walks of training tasks, stored and read again."""
    words = Tokenizer(models.WordLevel({"?": 0, "\n": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    roles = Roles(RolesConfig("language_mdp", "plain", "plain"), tokenizer)
    limits = RolloutLimits(max_turns=10_000, max_tokens=10**6, parallel=1)
    uniform = Exploration("epsilon", epsilon=1.0)  # an exit at random, never the actor
    rollout = Rollout(env, roles, limits, uniform)
    buffer = ReplayBuffer(tmp_path_factory.mktemp("walks") / "replay.sqlite")
    tasks = list(env.tasks("train"))
    jobs = [(tasks[i % len(tasks)], i) for i in range(EPISODES)]
    for episode in rollout.play(jobs, OracleActor(roles.codec)):
        buffer.append(episode)
    index = buffer.index()
    keys = [(int(i), t) for i, n in zip(index.ids, index.turns, strict=True) for t in range(n)]
    found = buffer.transitions(keys)
    buffer.close()
    return found


def where(text):
    """Room and goal of a state, and its exits by direction."""
    here, exits = text.removeprefix("no such exit. ").rstrip(".").split(". ")
    room, goal = here.split(", goal ")
    return room, goal, dict(exit.split(": ") for exit in exits.split(", "))


def test_the_next_state_of_one_is_the_state_of_the_next(transitions):
    for one, after in pairwise(transitions):
        if one.last:
            assert one.terminal and after.t == 0
        else:
            assert after.episode_id == one.episode_id and not one.terminal
            assert one.next_state_ids == after.state_ids
            own = {"role": "assistant", "content": one.turn.completion}
            assert after.state_messages == [*one.state_messages, own, *one.turn.replies]


def test_actions_lead_where_the_state_said(transitions):
    for x in transitions:
        goal, exits = where(x.state_messages[-1]["content"])[1:]
        target, (reply,) = exits[x.turn.action], x.turn.replies
        if not x.terminal:
            assert where(reply["content"])[:2] == (target, goal) and x.turn.reward == 0
        else:
            reason = "solved" if target == goal else "trap" if target == TRAP else "dark"
            assert x.turn.info["reason"] == reason
            assert x.turn.reward == float(target == goal)


def test_walks_end_as_often_as_the_solve_says(env, transitions):
    exact = env.exact("train")
    mdp, uniform = exact.mdp, exact.mdp.uniform()
    ends = Counter(x.turn.info["reason"] for x in transitions if x.terminal)
    expected = {"solved": env.success(uniform, "train")}
    visits = occupancy(mdp, uniform)
    trapped = mdp.allowed & (mdp.transition.sum(-1) == 0) & (mdp.success == 0)
    expected["trap"] = float((visits[:, None] * uniform * trapped).sum())
    expected["dark"] = 1 - sum(expected.values())
    for reason, p in expected.items():
        assert ends[reason] / EPISODES == pytest.approx(
            p, abs=4 * math.sqrt(p * (1 - p) / EPISODES)
        )
    assert len(transitions) / EPISODES == pytest.approx(visits.sum(), rel=0.1)
