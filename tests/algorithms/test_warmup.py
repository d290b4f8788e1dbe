"""The gate opens when predicted and real futures get the same verdicts, and not before."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from nlac_lightning.algorithms.warmup import CriticGate, WarmupConfig
from nlac_lightning.critic import Critique
from nlac_lightning.errors import ConfigError
from nlac_lightning.replay.episode import Transition, Turn


@dataclass
class Text:
    text: str
    weight: float = 1.0


class Verdicts:
    """A critic whose verdicts on predictions are given; real futures are judged by their text."""

    def __init__(self, predicted: list[bool | None]) -> None:
        self.predicted = predicted
        self.calls = 0

    def learned(
        self, states: Sequence[Transition], actions: Sequence[str], seed: int
    ) -> list[Critique]:
        self.calls += 1
        assert list(actions) == [s.turn.action for s in states]
        return [Critique("", good) for good in self.predicted[: len(states)]]

    def judge(
        self,
        states: Sequence[Transition],
        actions: Sequence[str],
        descriptions: Sequence[Sequence[str]],
        seed: int,
    ) -> list[Critique]:
        return [Critique("", {"+": True, "-": False, "?": None}[d[0]]) for d in descriptions]


def state() -> Transition:
    turn = Turn("a", "a", (1, 2), 0, 2, (), "given", 0, True, [], 0.0, False, False)
    return Transition(0, 0, "e", "t", "train", 0, (), [], (1, 2), turn, (), 0.0, 0.0, 0.0, 1)


def look(
    gate: CriticGate, predicted: list[bool | None], real: str, step: int = 4
) -> dict[str, float]:
    targets = [[] if mark == "x" else [Text(mark)] for mark in real]
    return gate.observe(
        Verdicts(predicted),  # type: ignore[arg-type]
        [state() for _ in real],
        targets,
        step,
        0,
    )


def gate(**options: float) -> CriticGate:
    return CriticGate(WarmupConfig(**({"max_steps": 100, "window": 1} | options)))  # type: ignore[arg-type]


def test_the_default_has_no_warm_up() -> None:
    at_once = CriticGate(WarmupConfig())
    critic = Verdicts([True])
    assert at_once.open(0)
    assert at_once.observe(critic, [state()], [[Text("+")]], 4, 0) == {}  # type: ignore[arg-type]
    assert critic.calls == 0


def test_agreement_is_a_balanced_accuracy() -> None:
    seen = gate()
    # 3 of 4 good ones and 0 of 1 bad one; what the evaluator cannot judge does not count
    metrics = look(seen, [True, True, True, False, True, False], "++++-?")
    assert metrics == {"gate_agreement": pytest.approx((3 / 4 + 0 / 1) / 2)}
    assert not seen.open(4)


def test_a_critic_that_always_says_good_never_opens_the_gate() -> None:
    seen = gate(agreement=0.8)
    look(seen, [True] * 10, "+++++++++-")
    assert seen.agreement() == 0.5 and not seen.open(4)


def test_one_kind_alone_proves_nothing() -> None:
    seen = gate(agreement=0.1)
    look(seen, [True, True], "++")
    assert seen.agreement() == 0.0 and not seen.open(4)


def test_an_unparsable_prediction_counts_as_wrong() -> None:
    seen = gate()
    look(seen, [True, None, False], "++-")
    assert seen.agreement() == pytest.approx((1 / 2 + 1) / 2)


def test_dropped_targets_are_left_out() -> None:
    seen = gate()
    look(seen, [True, False], "x+x-")
    assert seen.agreement() == 1.0
    assert look(gate(), [], "xx") == {}


def test_of_several_targets_the_likeliest_counts() -> None:
    seen = gate()
    targets = [[Text("-", 0.3), Text("+", 0.7)], [Text("-", 0.6), Text("+", 0.4)]]
    critic = Verdicts([True, False])
    seen.observe(critic, [state(), state()], targets, 4, 0)  # type: ignore[arg-type]
    assert seen.agreement() == 1.0


def test_the_gate_opens_after_a_full_window_and_stays_open() -> None:
    seen = gate(agreement=0.9, window=2)
    look(seen, [True, False], "+-", 4)
    assert not seen.open(4), "one look is no window"
    look(seen, [True, False], "+-", 8)
    assert seen.open(8) and seen.is_open
    assert look(seen, [False, True], "+-", 12) == {}, "no look once it is open"
    assert seen.open(12)


def test_old_looks_leave_the_window() -> None:
    seen = gate(agreement=0.9, window=1)
    look(seen, [False, True], "+-", 4)
    assert not seen.open(4)
    look(seen, [True, False], "+-", 8)
    assert seen.open(8)


def test_min_steps_hold_a_good_critic_back_and_max_steps_let_a_bad_one_go() -> None:
    seen = gate(min_steps=10, max_steps=20)
    look(seen, [True, False], "+-", 4)
    assert not seen.open(9) and seen.open(10)
    bad = gate(max_steps=20)
    look(bad, [False, True], "+-", 4)
    assert not bad.open(19) and bad.open(20)
    assert WarmupConfig(min_steps=7).max_steps == 7


@pytest.mark.parametrize(("step", "looks"), [(0, 0), (3, 0), (4, 1), (6, 0), (8, 1)])
def test_looks_are_spaced(step: int, looks: int) -> None:
    critic = Verdicts([True])
    gate(every=4).observe(critic, [state()], [[Text("+")]], step, 0)  # type: ignore[arg-type]
    assert critic.calls == looks


def test_state_survives_a_checkpoint() -> None:
    seen = gate(agreement=0.9, window=2)
    look(seen, [True, False], "+-", 4)
    again = gate(agreement=0.9, window=2)
    again.load_state_dict(seen.state_dict())
    look(again, [True, False], "+-", 8)
    assert again.open(8)
    third = gate()
    third.load_state_dict(again.state_dict())
    assert third.is_open


@pytest.mark.parametrize("name", ["min_steps", "max_steps", "every", "window", "agreement"])
def test_wrong_settings_name_the_field(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.warmup\.{name}"):
        WarmupConfig(**{name: -1})
