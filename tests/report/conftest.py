"""A made-up evaluation of a small help desk, used by all tests of the reports."""

import math
import random
from collections.abc import Callable

import pytest

from nlac_lightning.envs.base import Message
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord

OPENING: list[Message] = [
    {
        "role": "system",
        "content": "You serve customers. Identify the customer, verify the order, confirm before "
        "a write.\nTools: find_order(id), refund(order, item), close(message).",
    },
    {"role": "user", "content": "Hi, my kettle arrived broken. I want my money back."},
]
TURNS = [
    ("ask: Which order is it?", "It is order 4417.", "ask: What is your order number?"),
    ("find_order 4417", '{"order": 4417, "items": ["kettle"], "status": "delivered"}', None),
    ("ask: Shall I refund the kettle, 39.90?", "Yes, please.", None),
    ("refund 4417 kettle", "refunded 39.90", "refund 4417 kettle"),
    ("close: Your 39.90 are on their way.", "", None),
]


def make_result(
    policy: str, skill: float, episodes: int = 40, critic: str = "fair", seed: int = 0
) -> EvaluationResult:
    """Episodes whose steps are right with probability ``skill``.

    ``critic``: ``none``, ``fair`` (four verdicts in five are true) or ``good`` (says so always).
    """
    rng = random.Random(seed)
    records = []
    for i in range(episodes):
        steps, success = [], True
        for action, reply, refined in TURNS:
            right = rng.random() < skill
            success = success and right
            verdict = True if critic == "good" else right == (rng.random() < 0.8)
            judged = critic != "none"
            steps.append(
                StepRecord(
                    action=action if right else "refund 9999 kettle",
                    completion=f"think: one step at a time\n{action}",
                    critique=f"{'good' if verdict else 'bad'}: the order must be verified first. "
                    "Do: find_order 4417"
                    if judged
                    else "",
                    description="The desk finds the order and refunds it; reward 1."
                    if judged
                    else "",
                    verdict=verdict if judged else None,
                    score=(0.9 if verdict else 0.2) if judged else math.nan,
                    right=right,
                    valid=right or rng.random() < 0.5,
                    refined_action=refined if judged else None,
                    refined_right=True if judged and refined else None,
                    explored=rng.random() < 0.05,
                    reply=reply if right else "error: there is no order 9999. Ask for the id.",
                )
            )
            if not right:
                break
        if success:
            steps[-1] = StepRecord(**{**vars(steps[-1]), "reward": 1.0})
        reason = "task closed" if success else "step_limit"
        records.append(
            EpisodeRecord(
                f"refund-{i:03d}", "test", policy, success, float(success), steps, reason,
                17 * len(steps), OPENING,
            )
        )  # fmt: skip
    return EvaluationResult(policy, "test", records, "help_desk")


@pytest.fixture(scope="session")
def make() -> Callable[..., EvaluationResult]:
    return make_result


@pytest.fixture(scope="session")
def base() -> EvaluationResult:
    return make_result("base", 0.3, critic="good")


@pytest.fixture(scope="session")
def trained() -> EvaluationResult:
    return make_result("trained", 0.95)
