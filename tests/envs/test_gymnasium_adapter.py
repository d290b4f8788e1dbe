"""Gymnasium text environments, shown on a game of TextArena."""

import random
import re

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

from nlac_lightning.envs.gymnasium_adapter import GymnasiumEnv
from nlac_lightning.errors import ConfigError

GAME = "nlac_lightning.envs.textarena.TextArenaGame"


def guess_the_number(**settings) -> GymnasiumEnv:
    return GymnasiumEnv(GAME, {"game": "GuessTheNumber-v0"}, n_train=6, n_test=6, **settings)


def bisect(session):
    """Guess by halves; a generator of steps."""
    low, high = 1, 20
    while True:
        middle = (low + high) // 2
        step = session.step(f"I guess [{middle}].")
        yield step
        if step.terminated:
            return
        said = step.messages[-1]["content"]
        low, high = (middle + 1, high) if "higher" in said else (low, middle - 1)


def test_a_scripted_policy_wins_a_third_party_game_through_the_adapter():
    env = guess_the_number()
    lengths = set()
    for task in env.tasks("test"):
        session = env.reset(task)
        assert "between 1 and 20" in session.opening[1]["content"]
        steps = list(bisect(session))
        assert (steps[-1].reward, steps[-1].info["reason"]) == (1.0, "won")
        assert all(step.reward == 0 for step in steps[:-1]) and len(steps) <= 5
        assert all(re.search("higher|lower", s.messages[0]["content"]) for s in steps[:-1])
        assert session.step("[1]").info["error"] == "the episode is over"
        lengths.add(len(steps))
        session.close()
    assert len(lengths) > 1  # the tasks are different games


def test_equal_tasks_give_equal_games_side_by_side_and_leave_global_random_numbers_alone():
    env = guess_the_number()
    random.seed(3)
    outside = random.getstate()
    task, other = env.tasks("train")[:2]
    alone = list(bisect(env.reset(task)))
    first, second = bisect(env.reset(task)), bisect(env.reset(other))
    mixed = []
    for step in first:
        mixed.append(step)
        next(second, None)
    assert mixed == alone
    assert random.getstate() == outside


def test_bad_actions_are_answered_in_words():
    session = guess_the_number().reset(guess_the_number().tasks("train")[0])
    assert not session.step("").info["valid"]
    assert session.step("I do not know").messages


def test_splits_share_no_seed():
    seeds = [
        task.data["seed"]
        for seed in (0, 1)
        for split in ("train", "val", "test")
        for task in guess_the_number(seed=seed).tasks(split)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("path", "kwargs", "field"),
    [
        ("nowhere.Game", {}, "env.env"),
        ("Game", {}, "env.env"),
        ("gymnasium.envs.toy_text.FrozenLakeEnv", {}, "env.env"),
        ("collections.Counter", {}, "env.env"),
        (GAME, {"sport": 1}, "env.kwargs"),
        (GAME, {"game": "Nothing-v0"}, "env.kwargs.game"),
    ],
)
def test_wrong_settings_name_their_field(path, kwargs, field):
    with pytest.raises(ConfigError) as caught:
        GymnasiumEnv(path, kwargs)
    assert caught.value.field == field
