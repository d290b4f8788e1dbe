"""The language MDP: exact values against brute force, walks against the exact values."""

import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest

from nlac_lightning.envs.base import Task
from nlac_lightning.envs.language_mdp import LanguageMDPEnv
from nlac_lightning.envs.language_mdp.exact import ExactWorld
from nlac_lightning.envs.language_mdp.levels import make_world
from nlac_lightning.envs.language_mdp.session import LanguageMDPSession
from nlac_lightning.envs.language_mdp.solve import (
    FiniteMDP,
    discounted,
    evaluate,
    greedy,
    occupancy,
    optimal,
    success_rate,
)
from nlac_lightning.envs.language_mdp.texts import words
from nlac_lightning.envs.language_mdp.world import DIRECTIONS, ROOMS, TRAP, World
from nlac_lightning.envs.replay import resume
from nlac_lightning.errors import ConfigError
from nlac_lightning.roles.codec import one_line

LEVELS = (1, 2, 3)
SPLITS = ("train", "val", "test")


def small_mdp(seed: int, states: int = 3, actions: int = 3) -> FiniteMDP:
    """Random outcomes; 0.1 to 0.3 of each action's probability ends the episode in failure."""
    rng = np.random.default_rng(seed)
    parts = rng.dirichlet(np.ones(states + 1), (states, actions))
    parts *= rng.uniform(0.7, 0.9, (states, actions, 1))
    allowed = rng.random((states, actions)) < 0.8
    allowed[:, 0] = True
    return FiniteMDP(parts[..., 1:], parts[..., 0], allowed, rng.dirichlet(np.ones(states)))


def random_policy(mdp: FiniteMDP, seed: int) -> np.ndarray:
    weights = np.random.default_rng(seed).random(mdp.success.shape) * mdp.allowed
    return weights / weights.sum(-1, keepdims=True)


def unrolled(mdp: FiniteMDP, policy: np.ndarray, moves: int = 200) -> tuple[float, np.ndarray]:
    """Success and visits by following all the probability for many moves."""
    mass, won, visits = list(mdp.start), 0.0, np.zeros(len(mdp.start))
    for _ in range(moves):
        after = [0.0] * len(mass)
        for s, a in itertools.product(range(len(mass)), range(policy.shape[1])):
            taken = mass[s] * policy[s, a]
            won += taken * mdp.success[s, a]
            for t in range(len(mass)):
                after[t] += taken * mdp.transition[s, a, t]
        visits += mass
        mass = after
    return won, visits


# --- the solver ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_values_equal_the_unrolled_process(seed):
    mdp = small_mdp(seed)
    policy = random_policy(mdp, seed + 100)
    won, visits = unrolled(mdp, policy)
    assert success_rate(mdp, policy) == pytest.approx(won, abs=1e-9)
    np.testing.assert_allclose(occupancy(mdp, policy), visits, atol=1e-9)
    values = evaluate(mdp, policy)
    for s, a in itertools.product(range(3), range(3)):
        # Taking an action once and following the policy afterwards, from that state alone.
        first = mdp.success[s, a] + sum(
            unrolled(FiniteMDP(mdp.transition, mdp.success, mdp.allowed, np.eye(3)[t]), policy)[0]
            * mdp.transition[s, a, t]
            for t in range(3)
        )
        assert values.q[s, a] == pytest.approx(first, abs=1e-9)


def test_discounted_values_equal_repeated_backups():
    mdp = small_mdp(1)
    policy, q = random_policy(mdp, 7), np.zeros((3, 3))
    for _ in range(300):
        v = [sum(policy[t, b] * q[t, b] for b in range(3)) for t in range(3)]
        q = np.array(
            [
                [
                    mdp.success[s, a] + 0.7 * sum(mdp.transition[s, a, t] * v[t] for t in range(3))
                    for a in range(3)
                ]
                for s in range(3)
            ]
        )
    np.testing.assert_allclose(discounted(mdp, policy, 0.7), q, atol=1e-12)
    np.testing.assert_allclose(discounted(mdp, policy, 1.0), evaluate(mdp, policy).q, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_beats_or_equals_every_deterministic_policy(seed):
    mdp = small_mdp(seed)
    rates = []
    for choice in itertools.product(*(np.flatnonzero(row) for row in mdp.allowed)):
        rates.append(success_rate(mdp, np.eye(3)[list(choice)]))
    policy, values = optimal(mdp)
    assert success_rate(mdp, policy) == pytest.approx(max(rates), abs=1e-12)
    assert not policy[~mdp.allowed].any()
    np.testing.assert_allclose(evaluate(mdp, greedy(mdp, values.q)).v, values.v, atol=1e-12)


def test_arrays_that_are_no_process_are_refused():
    good = small_mdp(0)
    parts = {"transition": good.transition, "success": good.success}
    parts |= {"allowed": good.allowed, "start": good.start}
    wrong = {
        "transition": good.transition * 2,
        "start": good.start * 2,
        "allowed": np.zeros_like(good.allowed),
        "success": good.success - 1,
    }
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"mdp\.{name}"):
            FiniteMDP(**{**parts, name: value})
    with pytest.raises(ConfigError, match="policy"):
        evaluate(good, good.uniform() * 2)
    forever = FiniteMDP(np.ones((1, 1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), np.ones(1))
    with pytest.raises(ConfigError, match="for ever"):
        evaluate(forever, np.ones((1, 1)))


# --- worlds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", LEVELS)
def test_worlds_are_as_hard_as_promised(level, seed):
    env = LanguageMDPEnv(level, seed=seed)
    assert len(env.world.exact.world.exits) >= 20
    for split in SPLITS:
        rates = env.baselines(split)
        assert rates["optimal"] > 0.8
        assert rates["one_step_critic"] <= rates["heuristic"] < rates["optimal"] / 2
        assert rates["uniform"] < rates["heuristic"]
        if level == 3:
            assert rates["uniform"] <= 0.02
            assert rates["heuristic"] <= 0.1


@pytest.mark.parametrize("level", LEVELS)
def test_every_task_is_four_moves_or_more_by_exhaustive_search(level):
    env = LanguageMDPEnv(level)
    exits = env.world.exact.world.exits
    for task in (task for split in SPLITS for task in env.tasks(split)):
        reached = {task.data["start"]}
        for _ in range(3):
            reached |= {t for room in reached for t in exits[room].values() if t != TRAP}
            assert task.data["goal"] not in reached


def test_worlds_follow_the_seed_and_splits_share_no_pair():
    for level in LEVELS:
        one, same, other = (make_world(level, seed) for seed in (3, 3, 4))
        assert one.exact.world == same.exact.world != other.exact.world
        assert one.splits == same.splits
        pairs = [pair for split in SPLITS for pair in one.splits[split]]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == set(one.exact.world.pairs())


def test_tasks_are_plain_data_and_more_tasks_only_extend_a_split():
    few, many = LanguageMDPEnv(1, n_test=5), LanguageMDPEnv(1, n_test=50)
    assert few.tasks("test") == many.tasks("test")[:5]
    assert len({task.id for split in SPLITS for task in many.tasks(split)}) == 256 + 96 + 50
    assert len({json.dumps(task.data) for task in many.tasks("test")}) == 50


def test_optimal_values_are_discounted_shortest_ways():
    exact = LanguageMDPEnv(3).world.exact
    values = exact.optimum[1]
    for goal in exact.world.goals:
        distances = exact.world.distances(goal)
        for (room, wanted), i in exact.index.items():
            if wanted == goal:
                moves = distances.get(room, math.inf)
                expected = exact.world.survival ** (moves - 1) if moves < math.inf else 0.0
                assert values.v[i] == pytest.approx(expected, abs=1e-12)


# --- walks -----------------------------------------------------------------------------------


def walk(env, task, seed, choose):
    """Play one episode by ``choose(session)``; yields text before, action and step."""
    session = env.reset(task, seed)
    text, step = session.opening[-1]["content"], None
    while step is None or not step.terminated:
        action = choose(session)
        step = session.step(action)
        yield text, action, step
        text = step.messages[-1]["content"]


STATE = re.compile(r"(?:no such exit\. )?(\w+), goal (\w+)\. (.*)\.$")


def read_state(text):
    """Room, goal and exits, from the text alone."""
    room, goal, exits = STATE.match(text).groups()
    return room, goal, dict(part.split(": ") for part in exits.split(", "))


@pytest.mark.parametrize("level", LEVELS)
def test_moves_lead_where_the_text_says(level):
    env, rng = LanguageMDPEnv(level), np.random.default_rng(level)
    seen = {}
    for seed, task in enumerate(env.tasks("train")[:150]):
        for text, action, step in walk(env, task, seed, lambda _: str(rng.choice(DIRECTIONS))):
            room, goal, exits = read_state(text)
            assert seen.setdefault((room, goal), exits) == exits
            after = words(step.messages[-1]["content"])
            target = exits.get(action)
            assert step.info["valid"] == (target is not None)
            assert step.reward == float(target == goal)
            assert step.terminated == (target in (goal, TRAP) or "dark" in after)
            if target is None and not step.terminated:
                assert read_state(step.messages[-1]["content"]) == (room, goal, exits)
            elif target is not None:
                assert after[0] == target


@pytest.mark.parametrize("policy_name", ["uniform", "heuristic", "optimum"])
def test_played_walks_agree_with_the_solve(policy_name):
    env = LanguageMDPEnv(1, n_test=1500)
    exact, rng = env.exact("test"), np.random.default_rng(0)
    policies = {"uniform": exact.mdp.uniform(), "heuristic": exact.heuristic()}
    policy = {**policies, "optimum": exact.optimum[0]}[policy_name]
    n = len(env.tasks("test"))
    n -= n % len(env.world.splits["test"])  # every pair equally often
    won, dark, moves = 0, 0, 0
    for task in env.tasks("test")[:n]:
        choose = lambda s: DIRECTIONS[rng.choice(6, p=policy[s.state])]  # noqa: E731
        for _, _, step in walk(env, task, 5, choose):
            open_move = step.info.get("reason", "dark") == "dark"
            moves += open_move
            dark += open_move and step.terminated
        won += int(step.reward)
    rate = env.success(policy)
    assert abs(won / n - rate) < 4 * math.sqrt(rate * (1 - rate) / n)
    end = 1 - exact.world.survival
    assert abs(dark / moves - end) < 4 * math.sqrt(end * (1 - end) / moves)


def test_nonsense_is_evaluated_as_a_wall():
    env = LanguageMDPEnv(1, n_test=1500)
    exact, rng = env.exact("test"), np.random.default_rng(1)
    walls = ~exact.mdp.allowed
    policy = 0.7 * exact.optimum[0] + 0.3 * walls / walls.sum(-1, keepdims=True)

    def choose(session):
        return session.oracle_action() if rng.random() < 0.7 else "I ask for a map"

    n = 1500 - 1500 % len(env.world.splits["test"])
    last = [list(walk(env, task, 5, choose))[-1][2] for task in env.tasks("test")[:n]]
    won, rate = sum(step.reward for step in last), env.success(policy)
    assert abs(won / n - rate) < 4 * math.sqrt(rate * (1 - rate) / n)


def test_the_world_can_be_solved_from_its_texts_alone():
    env = LanguageMDPEnv(1)
    (goal,) = env.world.exact.world.goals
    maps = {}
    for start in env.world.exact.world.exits:
        if start != goal:
            session = env.reset(Task("t", "test", {"start": start, "goal": goal, "luck": 0}))
            room, _, exits = read_state(session.opening[-1]["content"])
            maps[room] = exits
    value = dict.fromkeys(maps, 0.0)
    for _ in range(100):
        value = {
            room: max(
                1.0 if t == goal else 0.0 if t == TRAP else 0.97 * value[t] for t in exits.values()
            )
            for room, exits in maps.items()
        }
    starts = [start for start, _ in env.world.splits["test"]]
    mean = sum(value[start] for start in starts) / len(starts)
    assert env.baselines("test")["optimal"] == pytest.approx(mean, abs=1e-12)


def test_equal_seeds_give_equal_walks_and_others_other_luck():
    env = LanguageMDPEnv(2)
    task = env.tasks("train")[0]
    play = lambda seed: list(walk(env, task, seed, lambda s: s.admissible()[0]))  # noqa: E731
    assert play(3) == play(3)
    assert len({len(play(seed)) for seed in range(20)}) > 1
    actions = [action for _, action, _ in play(3)]
    session = resume(env, task, 3, actions[:-1])
    assert session.step(actions[-1]) == play(3)[-1][2]


@pytest.mark.parametrize("level", LEVELS)
def test_the_oracle_agrees_with_the_exact_values(level):
    env, rng = LanguageMDPEnv(level), np.random.default_rng(level)
    exact, verdicts = env.world.exact, Counter()
    for task in env.tasks("train")[:40]:
        session, step = env.reset(task, 1), None
        while step is None or not step.terminated:
            q, exits = exact.optimum[1].q[session.state], session.admissible()
            best = max(q[DIRECTIONS.index(d)] for d in exits)
            for action in (*exits, "fly", *(d for d in DIRECTIONS if d not in exits)):
                critique = session.oracle_critique(action)
                value = q[DIRECTIONS.index(action)] if action in exits else -1.0
                assert critique.good == (value > best - 1e-9 and best > 0)
                assert q[DIRECTIONS.index(critique.action)] == pytest.approx(best, abs=1e-9)
                assert critique.action == action or not critique.good
                verdicts[critique.good] += 1
            action = str(rng.choice(exits))
            right = session.oracle_critique(action).good
            step = session.step(action)
            assert step.info["right"] == right
        assert session.oracle_action() is None
        assert session.oracle_critique("north") is None
        assert session.step("north").terminated
    assert min(verdicts.values()) > 100


def test_where_no_way_leads_to_the_goal_no_exit_is_right():
    exits = {"hall": {"up": "attic", "down": "cellar"}, "cellar": {"up": "den"}}
    world = World({**exits, "den": {"up": "cellar"}, "attic": {"up": "hall"}}, ("attic",), 0.9)
    exact = ExactWorld(world, (("hall", "attic"),))
    session = LanguageMDPSession(exact, ("cellar", "attic"), np.random.default_rng(0))
    assert not session.oracle_critique("up").good
    assert session.oracle_action() == "up"
    assert not session.step("up").info["right"]
    assert exact.baselines()["uniform"] == pytest.approx(0.5)


def test_texts_are_short_lines_of_known_words():
    known, rng = set(LanguageMDPEnv.vocabulary()), np.random.default_rng(0)
    assert len(known) < 100
    used = set()
    for level, seed in itertools.product(LEVELS, range(3)):
        env = LanguageMDPEnv(level, seed=seed)
        for task in env.tasks("train")[:60]:
            session = env.reset(task, seed)
            texts, step = [message["content"] for message in session.opening], None
            while step is None or not step.terminated:
                options = (*DIRECTIONS, "fly")
                texts += [session.oracle_critique(action).text() for action in options]
                step = session.step(str(rng.choice(options)))
                texts += [message["content"] for message in step.messages]
            for text in texts:
                assert one_line(text) == text
                assert len(words(text)) <= 24
                used |= set(words(text))
    assert used <= known
    # Nothing idle either, but for what stands before a line and rooms that no map drew.
    assert known - used <= {"Agent", "World", *ROOMS}


@pytest.mark.parametrize(
    "settings", [{"level": 4}, {"n_test": 0}, {"n_train": -1}, {"seed": -1}], ids=str
)
def test_bad_settings_name_the_field(settings):
    with pytest.raises(ConfigError, match=rf"env\.{next(iter(settings))}"):
        LanguageMDPEnv(**settings)


def test_a_task_of_another_world_is_refused():
    env, other = LanguageMDPEnv(1, seed=0), LanguageMDPEnv(3, seed=1)
    foreign = [t for t in other.tasks("test") if t.data["goal"] not in env.world.exact.world.goals]
    with pytest.raises(ConfigError, match=r"env\.seed"):
        env.reset(foreign[0])
