"""What each improvement step distils, with a critic whose judgements are written down."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from nlac_lightning import models
from nlac_lightning.critic import Critique
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion
from nlac_lightning.improvement import Improvement, Improver
from nlac_lightning.replay.episode import Transition, Turn
from nlac_lightning.roles.roles import Roles, RolesConfig

CUT = "cut off"


def say(text: str) -> Completion:
    return Completion((1, 2), text, (-0.1, -0.2), "length" if CUT in text else "stop")


def state(name: str) -> Transition:
    turn = Turn("a", "a", (1, 2), 0, 2, (), "given", 0, True, [], 0.0, False, False)
    return Transition(0, 0, "e", name, "train", 0, (), [], (1, 2), turn, (), 0.0, 0.0, 0.0, 1)


class Written:
    """A critic that calls right what starts with ``right`` and refines by a table."""

    def __init__(self, refinements: dict[str, str] | None = None, source: str = "learned") -> None:
        self.refinements, self.source = refinements or {}, source
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.refined: list[tuple[tuple[str, ...], tuple[str, ...], int]] = []

    def critique(
        self, states: Sequence[Transition], actions: Sequence[str], seed: int
    ) -> list[Critique]:
        assert len(states) == len(actions)
        self.asked.append((tuple(actions), seed))
        if self.source == "none":
            return [Critique("") for _ in actions]
        return [self.judge(action) for action in actions]

    def judge(self, action: str) -> Critique:
        """The score is the number that the action ends in, if any."""
        if "unclear" in action:
            return Critique("hm")
        whole = "half seen" not in action
        last = action.split()[-1] if action else ""
        score = float(last) if last[:1].isdigit() else math.nan
        return Critique(f"on {action}", action.startswith("right"), score, (), whole)

    def refine(
        self,
        states: Sequence[Transition],
        actions: Sequence[str],
        critiques: Sequence[Critique],
        seed: int,
    ) -> list[Completion]:
        assert len(states) == len(actions) == len(critiques)
        self.refined.append((tuple(actions), tuple(c.text for c in critiques), seed))
        return [say(self.refinements[action]) for action in actions]


@pytest.fixture(scope="module")
def roles(smollm2_path: str) -> Roles:
    config = RolesConfig(templates="help_desk_small", format="plain", action="react")
    return Roles(config, models.load_tokenizer(smollm2_path))


def improve(
    roles: Roles, kind: str, critic: Written, base: list[str], seed: int = 5, **options: Any
) -> list[Improvement]:
    """Improve one state per text (of steps with candidates: per n texts)."""

    n = options.get("n", 4) if kind in ("best_of_n", "advantage") else 1

    def sample(states: Sequence[Transition], at: int, many: int = 1) -> list[list[Completion]]:
        assert at == seed and many == n and len(states) == len(base) // n
        return [[say(text) for text in base[i : i + n]] for i in range(0, len(base), n)]

    states = [state(f"t{i}") for i in range(len(base) // n)]
    return Improver(kind, critic, roles, sample, **options)(states, seed)  # type: ignore[arg-type]


def distilled(results: list[Improvement]) -> list[str | None]:
    return [result.target.text if result.target else None for result in results]


def test_refine_distils_every_whole_refinement(roles: Roles) -> None:
    critic = Written({"wrong": "Thought: t\nAction: right", "right": f"x {CUT}", "odd": "  "})
    results = improve(roles, "refine", critic, ["Action: wrong", "right", "odd"])
    assert distilled(results) == ["Thought: t\nAction: right", None, None]
    assert {r.source for r in results} == {"refinement"}
    assert [r.action for r in results] == ["wrong", "right", "odd"]
    assert results[0].refined == "right" and results[0].critique.text == "on wrong"
    assert critic.refined == [(("wrong", "right", "odd"), ("on wrong", "on right", "on odd"), 5)]


def test_refine_iterates_m_times_on_its_own_actions(roles: Roles) -> None:
    critic = Written({"w1": "Action: w2", "w2": "Action: w3", "w3": "right"})
    results = improve(roles, "refine", critic, ["w1"], m=3)
    assert distilled(results) == ["right"]
    assert [actions for actions, _ in critic.asked] == [("w1",), ("w2",), ("w3",)]
    assert [texts for _, texts, _ in critic.refined] == [("on w1",), ("on w2",), ("on w3",)]
    assert len({seed for _, _, seed in critic.refined}) == 3
    assert results[0].action == "w1" and results[0].critique.text == "on w1"


def test_accept_distils_the_policys_own_good_actions(roles: Roles) -> None:
    critic = Written()
    base = ["right", "wrong", f"right {CUT}", "Action: right", "unclear"]
    results = improve(roles, "accept", critic, base)
    assert distilled(results) == ["right", None, None, "Action: right", None]
    assert {r.source for r in results} == {"policy"} and not critic.refined


def test_accept_without_a_critic_distils_all_whole_actions(roles: Roles) -> None:
    base = ["right", "wrong", f"right {CUT}"]
    results = improve(roles, "accept", Written(source="none"), base)
    assert distilled(results) == ["right", "wrong", None]


def test_refine_then_accept_refines_what_is_not_good_and_judges_again(roles: Roles) -> None:
    critic = Written(
        {
            "wrong 1": "Action: right",
            "wrong 2": "still wrong",
            "wrong 3": f"right {CUT}",
            "unclear": "right too",
        }
    )
    base = ["right", "wrong 1", "wrong 2", f"right {CUT}", "wrong 3", "unclear"]
    results = improve(roles, "refine_then_accept", critic, base)
    assert distilled(results) == ["right", "Action: right", None, None, None, "right too"]
    assert [r.source for r in results] == [
        "policy", "refinement", "refinement", "policy", "refinement", "refinement",
    ]  # fmt: skip
    assert critic.refined[0][0] == ("wrong 1", "wrong 2", "wrong 3", "unclear")
    assert [r.action for r in results] == base
    assert results[1].critique.text == "on wrong 1" and results[1].refined == "right"


def test_refine_then_accept_asks_no_refiner_when_all_is_good(roles: Roles) -> None:
    critic = Written()
    results = improve(roles, "refine_then_accept", critic, ["right", "right so"])
    assert distilled(results) == ["right", "right so"]
    assert not critic.refined and len(critic.asked) == 1


def test_best_of_n_distils_the_best_critique_of_each_state(roles: Roles) -> None:
    base = ["a 0.1", "b 0.9", "c 0.4", "unclear", "d 0.2", "e 0.3"]
    results = improve(roles, "best_of_n", Written(), base, n=3)
    # A critique without a score counts as one half.
    assert distilled(results) == ["b 0.9", "unclear"]
    assert [r.critique.text for r in results] == ["on b 0.9", "hm"]


def test_best_of_n_takes_the_best_whole_action(roles: Roles) -> None:
    base = [f"{CUT} 0.9", "b 0.2", "c 0.1", "  ", f"{CUT} 0.9", f"{CUT} 0.8"]
    results = improve(roles, "best_of_n", Written(), base, n=2)
    assert distilled(results) == ["b 0.2", "c 0.1", None]
    assert results[0].critique.text == "on b 0.2"


def test_advantage_distils_the_first_action_above_the_mean(roles: Roles) -> None:
    base = ["a 0.1", "b 0.3", "c 0.9", "d 0.1", "e 0.8", "f 0.1"]
    results = improve(roles, "advantage", Written(), base, n=3)
    # 0.3 is below the mean of the first three, though no action is good in words
    assert distilled(results) == ["c 0.9", "e 0.8"]
    assert [r.action for r in results] == ["c 0.9", "e 0.8"]
    first = improve(roles, "advantage", Written(), ["a 0.1", "b 0.5", "c 0.6"], n=3)
    assert distilled(first) == ["b 0.5"], "the first above the mean, not the best"


def test_advantage_judges_equal_actions_once_and_learns_nothing_from_ties(roles: Roles) -> None:
    critic = Written()
    base = ["a 0.9", "Action: a 0.9", "Thought: t\nAction: a 0.9", "a 0.2", "b 0.2", "a 0.2"]
    results = improve(roles, "advantage", critic, base, n=3)
    assert distilled(results) == [None, None] and [r.action for r in results] == ["a 0.9", "a 0.2"]
    assert critic.asked == [(("a 0.9", "a 0.2", "b 0.2"), 5)]
    # multiplicity counts in the mean: 0.5 is above that of four, not of the two kinds
    critic = Written()
    base = ["a 0.1", "a 0.1", "b 0.5", "c 0.9"]
    assert distilled(improve(roles, "advantage", critic, base, n=4)) == ["b 0.5"]


def test_advantage_distils_no_cut_off_action_and_an_unknown_score_is_one_half(roles: Roles) -> None:
    base = [f"{CUT} 0.9", "b 0.8", "c 0.1", "unclear", "d 0.1", "  "]
    results = improve(roles, "advantage", Written(), base, n=3)
    assert distilled(results) == ["b 0.8", "unclear"]
    only = improve(roles, "advantage", Written(), [f"{CUT} 0.9", "b 0.1", "c 0.1"], n=3)
    assert distilled(only) == [None]


def test_advantage_without_a_critic_takes_what_comes_first(roles: Roles) -> None:
    base = ["b 0.1", "a 0.9", f"{CUT} 0.9", "c 0.5"]
    results = improve(roles, "advantage", Written(source="none"), base, n=2)
    assert distilled(results) == ["b 0.1", None]


def test_a_cut_off_critique_decides_nothing(roles: Roles) -> None:
    results = improve(roles, "accept", Written(), ["right", "right half seen"])
    assert distilled(results) == ["right", None]
    critic = Written({"right half seen": "right again"})
    results = improve(roles, "refine_then_accept", critic, ["right half seen"])
    assert distilled(results) == ["right again"]
    critic = Written({"wrong": "right half seen"})
    assert distilled(improve(roles, "refine_then_accept", critic, ["wrong"])) == [None]
    base = ["half seen 0.9", "b 0.6", "half seen 0.1", "c 0.4"]
    results = improve(roles, "best_of_n", Written(), base, n=2)
    assert distilled(results) == ["b 0.6", "half seen 0.1"], "it counts as one half"


def test_an_unknown_kind_is_refused(roles: Roles) -> None:
    with pytest.raises(ConfigError, match=r"model\.improvement"):
        improve(roles, "magic", Written(), [])
