"""Scalars of an evaluation by hand, and the way to JSON and back."""

import math
from dataclasses import replace

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.metrics import wilson_interval


def episode(success: bool, *steps: StepRecord, tokens: int = 10) -> EpisodeRecord:
    return EpisodeRecord("t", "test", "base", success, float(success), list(steps), "done", tokens)


RESULT = EvaluationResult(
    "base",
    "test",
    [
        episode(
            True,
            StepRecord("a", critique="good", verdict=True, score=0.9, right=True),
            StepRecord("b", critique="bad", verdict=False, score=0.2, right=True,
                       refined_action="z", refined_right=False),
            StepRecord("c", right=True),
            tokens=30,
        ),
        episode(
            False,
            StepRecord("d", critique="?", right=False, valid=False,
                       refined_action="a", refined_right=True),
        ),
        episode(False, StepRecord("e", critique="bad", verdict=False, score=0.1)),
    ],
    "toy",
)  # fmt: skip


def test_summary_by_hand() -> None:
    out = RESULT.summary()
    assert (out["success"], out["success_low"], out["success_high"]) == wilson_interval(1, 3)
    assert out["valid_rate"] == 4 / 5
    assert out["right_rate"] == 3 / 4, "a step that the oracle did not judge does not count"
    assert out["mean_turns"] == pytest.approx(5 / 3)
    assert out["tokens_per_episode"] == pytest.approx(50 / 3)
    assert out["n_episodes"] == 3
    # Oracle: a, b and the unparsable d. Outcome: e as well. c was never criticised.
    assert out["critic_vs_oracle/n"] == 3 and out["critic_vs_outcome/n"] == 4
    assert out["critic_vs_oracle/accuracy"] == 1 / 2
    assert out["critic_vs_outcome/accuracy"] == pytest.approx(2 / 3)
    assert math.isnan(out["critic_vs_oracle/auroc"]), "d, the only wrong action, has no score"
    assert out["critic_vs_outcome/auroc"] == 1.0
    assert out["critic_vs_outcome/positive_share"] == pytest.approx(1 / 3)
    assert out["critic_vs_outcome/unparsable"] == 1 / 4
    assert (out["refine_wrong_to_right"], out["refine_n_wrong"]) == (1.0, 1)
    assert (out["refine_right_to_wrong"], out["refine_n_right"]) == (1.0, 1)


def test_empty_critique_after_a_description_is_a_failed_critique() -> None:
    step = StepRecord("a", description="it will work", right=True)
    out = replace(RESULT, episodes=[episode(True, step)]).summary()
    assert out["critic_vs_oracle/n"] == out["critic_vs_oracle/unparsable"] == 1


def test_summary_without_episodes() -> None:
    out = replace(RESULT, episodes=[]).summary()
    assert math.isnan(out["success"]) and math.isnan(out["mean_turns"])
    assert out["n_episodes"] == out["critic_vs_outcome/n"] == 0
    assert out.keys() == RESULT.summary().keys()


def test_json_round_trip_keeps_everything(trained: EvaluationResult) -> None:
    odd = episode(True, StepRecord("\ud800 \x00 \u202e <b>", score=math.nan))
    result = replace(trained, episodes=[*trained.episodes, odd])
    text = result.to_json()
    assert text.isascii() and "NaN" not in text
    back = EvaluationResult.from_json(text)
    assert math.isnan(back.episodes[-1].steps[0].score)
    # nan differs from itself, so compare what is written of it.
    assert back.to_json() == text
    assert back.episodes[:-1] == result.episodes[:-1]
    assert back.episodes[-1].steps[0].action == "\ud800 \x00 \u202e <b>"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": 99}', '{"format": 1, "policy": "base"}',
        RESULT.to_json()[:-20], RESULT.to_json().replace('"steps"', '"stops"'),
        RESULT.to_json().replace('"reason"', '"surprise"'),
    ],
)  # fmt: skip
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="evaluation result"):
        EvaluationResult.from_json(text)
