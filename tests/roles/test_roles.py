"""Prompts that begin with the state, answers that are read and never leak a thought."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlac_lightning import models
from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Sampling
from nlac_lightning.roles.roles import (
    ROLES,
    RoleConfig,
    Roles,
    RolesConfig,
    find_verdict,
    split_thought,
)

MESSAGES: list[Message] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "I want my money back."},
    {"role": "assistant", "content": "refund 1"},
    {"role": "tool", "name": "desk", "content": "error: verify first"},
]
FIELDS: dict[str, dict[str, Any]] = {
    "policy": {},
    "successor": {"action": "verify 1"},
    "backup": {"replies": "ok", "next_description": "d", "terminal": False, "reward": 0.0},
    "evaluator": {"action": "verify 1", "descriptions": ["ok. End: solved."]},
    "refinement": {"action": "verify 1", "critique": "bad, refund 1."},
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: str) -> Any:
    return models.load_tokenizer(smollm2_path)


def make(tokenizer: Any, **options: Any) -> Roles:
    return Roles(RolesConfig(**{"templates": "help_desk_small"} | options), tokenizer)


@pytest.mark.parametrize("kind", ["plain", "chat"])
@pytest.mark.parametrize("role", ROLES)
def test_a_prompt_starts_with_the_states_ids(tokenizer: Any, kind: str, role: str) -> None:
    roles = make(tokenizer, format=kind)
    # Ids as they may have been sampled: not what encoding the text again would give.
    state = (*roles.codec.messages(MESSAGES), *roles.codec.text("re"), *roles.codec.text("fund"))
    prompt = roles.prompt(role, state, MESSAGES, **FIELDS[role])
    assert prompt.ids[: len(state)] == state
    rest = roles.codec.decode(prompt.ids[len(state) :])
    assert all(str(v) in rest for k, v in FIELDS[role].items() if k in ("critique", "replies"))
    assert roles.request(role, prompt).ids == prompt.ids


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_policy_and_refinement_answer_in_the_same_place(tokenizer: Any, kind: str) -> None:
    """What the refiner writes is distilled behind the policy's prompt as it is."""
    roles = make(tokenizer, format=kind)
    state = roles.codec.messages(MESSAGES)
    header = roles.codec.header()
    for role in ("policy", "refinement"):
        ids = roles.prompt(role, state, MESSAGES, **FIELDS[role]).ids
        assert ids[len(ids) - len(header) :] == header
    assert roles.prompt("policy", state, MESSAGES).ids == state + header


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_a_role_without_context_sees_only_its_fields(tokenizer: Any, kind: str) -> None:
    roles = make(tokenizer, format=kind, evaluator=RoleConfig(context="none"))
    state = roles.codec.messages(MESSAGES)
    alone = roles.prompt("evaluator", state, MESSAGES, **FIELDS["evaluator"])
    assert alone == roles.prompt("evaluator", (), MESSAGES, **FIELDS["evaluator"])
    assert "money" not in roles.codec.decode(alone.ids)
    assert "ok. End: solved." in roles.codec.decode(alone.ids)


def test_the_forced_start_of_an_answer_is_counted(tokenizer: Any) -> None:
    roles = make(tokenizer, format="plain")
    prompt = roles.prompt("backup", (), MESSAGES, **FIELDS["backup"])
    assert prompt.prefill > 0
    forced = roles.codec.decode(prompt.ids[len(prompt.ids) - prompt.prefill :])
    assert (
        forced
        == roles.templates["backup"].render(
            {"opening": "", "observation": "", "agent": "", **FIELDS["backup"]}
        )[1]
    )
    assert roles.prompt("successor", (), MESSAGES, action="x").prefill == 0


def test_requests_carry_the_roles_settings(tokenizer: Any) -> None:
    sampling = Sampling(temperature=0.3, max_new_tokens=5)
    roles = make(
        tokenizer, format="plain", successor=RoleConfig(adapter="target", sampling=sampling)
    )
    prompt = roles.prompt("successor", (), MESSAGES, action="x")
    request = roles.request("successor", prompt, seed=9)
    assert (request.adapter, request.seed) == ("target", 9)
    assert request.sampling.temperature == 0.3 and request.sampling.stop == ("\n",)
    assert request.stop_ids == roles.codec.stop_ids
    changed = roles.request("successor", prompt, adapter="base", temperature=0.0)
    assert changed.adapter == "base" and changed.sampling.temperature == 0.0
    own = Sampling(stop=(" END",))
    roles = make(tokenizer, format="plain", successor=RoleConfig(sampling=own))
    assert roles.request("successor", prompt).sampling.stop == (" END",)


def test_the_papers_adapters_are_the_defaults(tokenizer: Any) -> None:
    roles = make(tokenizer)
    adapters = {role: roles.settings(role).adapter for role in ROLES}
    assert adapters.pop("backup") == "target"
    assert set(adapters.values()) == {"online"}


@pytest.mark.parametrize("wrong", [{"adapter": "other"}, {"context": "half"}])
def test_wrong_role_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoleConfig(**wrong)


SECRET = "the customer lies"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (f"Thought: {SECRET}\nAction: refund 1", "refund 1"),
        (f"{SECRET}\naction : refund 1", "refund 1"),
        (f"Thought: {SECRET}\n**Action:** refund 1", "refund 1"),
        (f"Thought: {SECRET}\nAction:\nrefund 1\nat once", "refund 1\nat once"),
        (f"Thought: {SECRET}\nAction: ask\nThought: no, {SECRET}\nAction: refund 1", "refund 1"),
        (f"<think>{SECRET}\nAction: ask</think>Action: refund 1", "refund 1"),
        (f"<think>{SECRET}</think>\nrefund 1", "refund 1"),
        (f"<think>{SECRET}", ""),
        (f"<think>{SECRET}\nAction: refund 1", ""),
        (f"{SECRET}</think>\nrefund 1", "refund 1"),  # the template's header opened the thought
        (f"{SECRET}\nAction: ask\n</think>\nrefund 1", "refund 1"),
        (f"Thought: {SECRET}", ""),
        (f"**Thought:** {SECRET}", ""),
        (f"Thought: {SECRET}. Action: refund 1", ""),  # not on a line of its own
        (f"Thought: {SECRET}\nAction:", ""),
        ("refund 1", "refund 1"),
        ("  refund 1 \n", "refund 1"),
        ("", ""),
    ],
)
def test_nothing_of_a_thought_reaches_the_environment(text: str, action: str) -> None:
    assert split_thought(text)[1] == action


@settings(deadline=None)
@given(st.text(alphabet="ab \n.:*", max_size=20), st.text(alphabet="xy 1\n", max_size=10))
def test_any_thought_stays_inside(thought: str, action: str) -> None:
    for text in (
        f"Thought: {thought}\nAction: {action}",
        f"<think>{thought}</think>\nAction: {action}",
        f"{thought}</think>{action}",
    ):
        assert split_thought(text)[1] == action.strip()


def test_plain_actions_are_the_whole_answer(tokenizer: Any) -> None:
    text = " Action: refund 1\n"
    assert make(tokenizer, action="plain").action(text) == "Action: refund 1"
    assert make(tokenizer, action="react").action(text) == "refund 1"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (" good.", True),
        ("Bad, verify first. Then all is good.", False),
        ("The action is GOOD: it verifies.", True),
        ("goodness, badly", None),
        ("", None),
        ("not good", False),
        ("This is not a very good step.", False),
        ("It isn't good: verify first.", False),
        ("It isn\u2019t good.", False),
        ("No good, verify first.", False),
        ("not bad", True),
        ("Not now. Good would be to verify.", True),
        ("not verified, bad.", False),
        ("Do not worry about the zip code here, good.", True),
        ("There is a notable good side.", True),
    ],
)
def test_verdicts(text: str, good: bool | None) -> None:
    found = find_verdict(text)
    assert (found[0] if found else None) is good


def test_the_score_is_the_probability_of_good(tokenizer: Any) -> None:
    roles = make(tokenizer)

    def score(text: str, *logprobs: float) -> float:
        return roles.verdict(Completion((1, 2), text, logprobs, "stop")).score

    assert score("good", math.log(0.8), -5.0) == pytest.approx(0.8)
    assert score("bad", math.log(0.8), -5.0) == pytest.approx(0.2)
    assert score("good", 1e-6) == 1.0, "rounding never leaves [0, 1]"
    assert score("good") == 1.0 and score("bad") == 0.0
    assert math.isnan(score("hm", -1.0))


def test_the_score_is_that_of_the_word_that_judges(tokenizer: Any) -> None:
    roles = make(tokenizer)

    def score(text: str, word: float, other: float = 0.2) -> float:
        ids = roles.codec.text(text)
        verdict = [roles.codec.decode([i]).strip().lower() in ("good", "bad") for i in ids]
        logprobs = tuple(math.log(word if judges else other) for judges in verdict)
        return roles.verdict(Completion(ids, text, logprobs, "stop")).score

    assert score(" good.", 0.7) == pytest.approx(0.7)
    assert score("The action is good: done.", 0.7) == pytest.approx(0.7)
    assert score("Well, this one is bad, verify.", 0.7) == pytest.approx(0.3)
    assert score("It is not good.", 0.7) == pytest.approx(0.3)
    pieces = len(roles.codec.text("GOOD"))
    assert pieces > 1 and score("GOOD", 0.0, 0.5) == pytest.approx(0.5**pieces)


def test_a_cut_off_critique_that_judges_still_counts(tokenizer: Any) -> None:
    cut = Completion((1,), "bad, ver", (math.log(0.9),), "length")
    assert make(tokenizer).verdict(cut).good is False


ENDINGS = ("solved", "not done")


def test_the_ending_is_the_last_of_the_two_and_its_probability_the_score(tokenizer: Any) -> None:
    roles = make(tokenizer, endings=ENDINGS)

    def ending(text: str, word: float, other: float = 0.2) -> tuple[bool | None, float]:
        """With probability ``word`` for each token of the last ending."""
        ids = roles.codec.text(text)
        at = max(text.lower().rfind(e) for e in ENDINGS)
        starts = [len(roles.codec.decode(ids[:n])) for n in range(len(ids) + 1)]
        last = next((e for e in ENDINGS if text.lower()[max(at, 0) :].startswith(e)), "")
        logprobs = tuple(
            math.log(word if at < starts[n + 1] and starts[n] < at + len(last) else other)
            for n in range(len(ids))
        )
        verdict = roles.ending(Completion(ids, text, logprobs, "stop"))
        return verdict.good, verdict.score

    pieces = len(roles.codec.text(" solved"))
    assert ending("ok. End: solved.", 0.7) == (True, pytest.approx(0.7**pieces))
    pieces = len(roles.codec.text(" not done"))
    assert ending("solved? no: not done.", 0.9) == (False, pytest.approx(1 - 0.9**pieces))
    assert ending("It is Not Done!", 1.0)[0] is False, "case does not count"
    for text in ("unsolved.", "hm", ""):
        good, score = ending(text, 0.5)
        assert good is None and math.isnan(score)


def test_an_ending_is_replaced_where_it_stands(tokenizer: Any) -> None:
    roles = make(tokenizer, endings=ENDINGS)
    assert roles.end_as("solved or not: SOLVED.", False) == "solved or not: not done."
    assert roles.end_as("kitchen. End: not done.", True) == "kitchen. End: solved."
    assert roles.end_as("nothing is known", True) == "nothing is known"
    silent = make(tokenizer)
    assert silent.end_as("End: solved.", False) == "End: solved."
    assert silent.ending(Completion((1,), "solved", (-0.1,), "stop")).good is None


@pytest.mark.parametrize("wrong", [("good", " Good"), ("", "bad"), ("solved", "unsolved")])
def test_endings_that_cannot_be_told_apart_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.roles\.endings"):
        RolesConfig(endings=wrong)
