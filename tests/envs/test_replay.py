"""Playing stored actions again leads to the same state."""

import random

import pytest

from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.envs.replay import resume
from nlac_lightning.errors import ConfigError


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_resume_gives_the_state_that_the_actions_led_to(level):
    env, rng = HelpDeskEnv(level), random.Random(2)
    for task in env.tasks("test")[:6]:
        session, actions = env.reset(task, 3), []
        for _ in range(5):
            action = rng.choice([session.oracle_action(), *session.admissible(), "what?"])
            again = resume(env, task, 3, actions)
            assert again.oracle_action() == session.oracle_action()
            assert again.oracle_critique(action) == session.oracle_critique(action)
            assert again.step(action) == session.step(action)
            actions.append(action)


def test_resume_past_the_end_names_the_settings():
    env = HelpDeskEnv(max_turns=2)
    task = env.tasks("train")[0]
    assert resume(env, task, 0, ["close", "close"]).oracle_action() is None
    with pytest.raises(ConfigError, match="ends after 2 of 3"):
        resume(env, task, 0, ["close"] * 3)
