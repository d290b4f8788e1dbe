"""The critic's questions and sources; what a model would say is written down here."""

import math
from collections.abc import Callable, Sequence

import pytest

from nlac_lightning import models
from nlac_lightning.actors import OracleActor
from nlac_lightning.critic import Critic
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Request
from nlac_lightning.replay.episode import Transition
from nlac_lightning.roles.roles import RoleConfig, Roles, RolesConfig
from nlac_lightning.rollout import Rollout, RolloutLimits

ENV = HelpDeskEnv(level=0, n_train=2)


class Written:
    """A generator that answers by a function of the request and its prompt in words."""

    def __init__(self, roles: Roles, answer: Callable[[str, int], tuple[str, str]]) -> None:
        self.roles, self.answer = roles, answer
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        outs = []
        for n, request in enumerate(requests):
            text, reason = self.answer(self.roles.codec.decode(request.ids), n)
            ids = self.roles.codec.text(text)
            outs.append(Completion(ids, text, (math.log(0.9),) * len(ids), reason))
        return outs


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="plain")
    return Roles(config, models.load_tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def states(roles: Roles) -> list[Transition]:
    """All transitions of two solved dialogues."""
    rollout = Rollout(ENV, roles, RolloutLimits())
    jobs = [(task, 3) for task in ENV.tasks("train")]
    episodes = rollout.play(jobs, OracleActor(roles.codec))
    return [transition for episode in episodes for transition in episode.transitions()]


def writes(prompt: str, n: int) -> tuple[str, str]:
    """Futures are numbered by request; the judgement repeats what it was asked about."""
    if prompt.endswith("Judgement:"):
        asked = prompt.rsplit("Result: ", 1)[1].removesuffix(" Judgement:")
        return (" bad, do more." if "future 1" in asked else f" good: {asked}"), "stop"
    return f" future {n}", "length" if n == 2 else "stop"


def test_describe_draws_k_futures_of_each_action(roles: Roles, states: list[Transition]) -> None:
    generator = Written(roles, writes)
    futures = Critic(roles, generator).describe(states[:3], ["a", "b", "c"], 10, "target", k=2)
    assert [[f.text for f in some] for some in futures] == [
        [" future 0", " future 1"], [" future 2", " future 3"], [" future 4", " future 5"],
    ]  # fmt: skip
    assert {r.adapter for r in generator.requests} == {"target"}
    assert len({r.seed for r in generator.requests}) == 6
    for n, request in enumerate(generator.requests):
        prompt = roles.prompt("successor", states[n // 2].state_ids, [], action="abc"[n // 2])
        assert request.ids == prompt.ids


def test_a_learned_critique_rests_on_its_futures(roles: Roles, states: list[Transition]) -> None:
    critiques = Critic(roles, Written(roles, writes)).critique(states[:3], ["a", "b", "c"], 0)
    assert [c.good for c in critiques] == [True, False, True]
    assert critiques[0].text == "good: future 0" and critiques[0].descriptions == ("future 0",)
    assert critiques[0].score == pytest.approx(0.9)
    assert critiques[1].score == pytest.approx(0.1)
    assert [c.complete for c in critiques] == [True, True, False], "a future was cut off"


def test_with_named_endings_the_score_is_the_mean_probability_of_the_good_one(
    smollm2_path: str, states: list[Transition]
) -> None:
    config = RolesConfig(
        templates="help_desk_small", format="plain", action="plain", endings=("happy", "angry")
    )
    roles = Roles(config, models.load_tokenizer(smollm2_path))
    said = [" happy", " angry", " asleep", " angry", " asleep", " asleep"]

    def answer(prompt: str, n: int) -> tuple[str, str]:
        return (" good" if prompt.endswith("Judgement:") else said[n]), "stop"

    critiques = Critic(roles, Written(roles, answer), k=2).critique(states[:3], list("abc"), 0)
    sure = [0.9 ** len(roles.codec.text(word)) for word in said]  # Written's tokens have 0.9
    assert critiques[0].score == pytest.approx((sure[0] + 1 - sure[1]) / 2)
    assert critiques[1].score == pytest.approx(1 - sure[3]), "of the futures that have an ending"
    assert math.isnan(critiques[2].score) and critiques[2].good is True


def test_the_evaluator_sees_all_k_futures(
    smollm2_path: str, states: list[Transition], tmp_path: object
) -> None:
    config = RolesConfig(templates="default", format="plain", action="plain")
    roles = Roles(config, models.load_tokenizer(smollm2_path))
    generator = Written(roles, lambda prompt, n: (f" future {n}", "stop"))
    critiques = Critic(roles, generator, k=3).critique(states[:1], ["a"], 0)
    assert critiques[0].descriptions == ("future 0", "future 1", "future 2")
    judged = roles.codec.decode(generator.requests[-1].ids)
    assert all(f"future {n}" in judged for n in range(3))


def test_the_oracle_tells_the_environments_truth(roles: Roles, states: list[Transition]) -> None:
    critic = Critic(roles, Written(roles, writes), "oracle", env=ENV)
    right = critic.critique(states, [state.turn.action for state in states], 0)
    assert all(c.good and c.score == 1.0 and c.text.startswith("good") for c in right)
    wrong = critic.critique(states, ["nonsense"] * len(states), 0)
    assert not any(c.good or c.score for c in wrong)
    for state, critique in zip(states, wrong, strict=True):
        assert state.turn.action in critique.text, "it names the right action"


def test_an_oracle_without_knowledge_is_a_configuration_error(
    roles: Roles, states: list[Transition]
) -> None:
    with pytest.raises(ConfigError, match=r"model\.critic"):
        Critic(roles, Written(roles, writes), "oracle").critique(states[:1], ["a"], 0)
    assert Critic(roles, Written(roles, writes)).truth(states[0], "a") is None


def test_no_critic_costs_nothing_and_says_nothing(roles: Roles, states: list[Transition]) -> None:
    generator = Written(roles, writes)
    critiques = Critic(roles, generator, "none").critique(states, ["a"] * len(states), 0)
    assert {(c.text, c.good) for c in critiques} == {("", None)}
    assert all(math.isnan(c.score) for c in critiques) and not generator.requests


def test_shuffled_gives_each_action_anothers_critique(
    roles: Roles, states: list[Transition]
) -> None:
    some = states[:4]
    for seed in range(6):
        own = Critic(roles, Written(roles, writes)).critique(some, list("abcd"), seed)
        other = Critic(roles, Written(roles, writes), "shuffled").critique(some, list("abcd"), seed)
        assert {c.descriptions for c in own} == {c.descriptions for c in other}
        assert all(a.descriptions != b.descriptions for a, b in zip(own, other, strict=True))


def test_refine_asks_with_action_and_critique(roles: Roles, states: list[Transition]) -> None:
    generator = Written(roles, lambda prompt, n: (" better", "stop"))
    critic = Critic(roles, generator)
    judged = Critic(roles, Written(roles, writes)).critique(states[:2], ["a", "b"], 0)
    refined = critic.refine(states[:2], ["a", "b"], judged, 0)
    assert [c.text for c in refined] == [" better", " better"]
    for request, state, action, critique in zip(
        generator.requests, states, "ab", judged, strict=False
    ):
        assert request.ids[: len(state.state_ids)] == state.state_ids
        asked = roles.codec.decode(request.ids[len(state.state_ids) :])
        assert f'"{action}"' in asked and critique.text in asked


def test_played_holds_what_the_online_adapter_judged_and_refined(
    smollm2_path: str, states: list[Transition]
) -> None:
    config = RolesConfig(
        templates="help_desk_small", format="plain", evaluator=RoleConfig(adapter="base")
    )
    roles = Roles(config, models.load_tokenizer(smollm2_path))
    generator = Written(roles, writes)
    critic = Critic(roles, generator)
    judged = critic.critique(states[:2], ["a", "b"], 0)
    assert critic.played == [], "a frozen evaluator cannot be forgotten"
    critic.refine(states[:2], ["a", "b"], judged, 0)
    assert len(critic.played) == 2
    for (ids, start), request in zip(critic.played, generator.requests[-2:], strict=True):
        assert ids[:start] == request.ids and len(ids) > start
