"""The scripted user: answers, reactions, endings; and on every task of tau2."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from nlac_lightning.errors import ConfigError
from nlac_lightning.users.asked import hear
from nlac_lightning.users.base import UserReply, UserTask
from nlac_lightning.users.script import first_person, read_script
from nlac_lightning.users.scripted import ScriptedUser
from nlac_lightning.users.text import user_words

DONE = "Your request has been completed. Is there anything else I can help you with?"

LAMP = UserTask(
    task_id="lamp",
    reason_for_call="You want to return the lamp from order #W1234567 and exchange the kettle. "
    "If the agent asks for confirmation, only return the lamp.",
    known_info="You are Ann Lee and your user id is ann_lee_1234. You live in zip code 12345.",
    unknown_info="You do not remember your email address.",
    instructions="You are terse. If the agent says that a refund to PayPal is not possible, "
    "ask for a gift card. If asked for the reason, say that it is too bright. "
    "You prefer the blue kettle.",
)


def talk(task: UserTask, *messages: str, **options: int) -> list[UserReply]:
    session = ScriptedUser(**options).start(task, 0)
    return [session.open(), *(session.reply(message) for message in messages)]


def test_the_wish_comes_first_and_details_only_when_asked() -> None:
    opening, ident, place, mail = talk(
        LAMP,
        "Could you please give me your user ID?",
        "Please provide your full name and zip code.",
        "What is your email address?",
    )
    assert "I want to return the lamp" in opening.text and "#W1234567" in opening.text
    for hidden in ("ann_lee_1234", "Ann Lee", "12345.", "confirmation", "too bright"):
        assert hidden not in opening.text
    assert ident.text == "My user id is ann_lee_1234."
    assert "Ann Lee" in place.text and "12345" in place.text
    assert "do not know my email address" in mail.text
    assert not any(r.stop or r.failed for r in (opening, ident, place, mail))


def test_a_choice_of_identifiers_is_answered_by_the_known_ones() -> None:
    _, reply = talk(LAMP, "Please provide your email, or your name and zip code.")
    assert "do not know my email" in reply.text and "Ann Lee" in reply.text


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("I will return the lamp and exchange the kettle. Do you confirm (yes/no)?", "Only return"),
        ("Unfortunately a refund to PayPal is not possible.", "gift card"),
        ("May I ask for the reason of the return?", "too bright"),
        ("Which kettle would you prefer?", "blue kettle"),
    ],
)
def test_conditions_are_followed_when_they_come_true(message: str, answer: str) -> None:
    opening, reply = talk(LAMP, message)
    assert answer not in opening.text and answer in reply.text and not reply.stop


def test_a_reaction_is_used_once_and_then_consent_is_given() -> None:
    ask = "Shall I go ahead?"
    _, first, second = talk(LAMP, "Please confirm the return. Shall I proceed?", ask)
    assert first.text.startswith("Only return") and second.text == "Yes, please go ahead."


def test_stop_is_held_back_until_everything_is_reported() -> None:
    replies = talk(
        LAMP,
        "I will return the lamp now.",
        "Is there anything else?",
        "The lamp has been returned. Is there anything else I can help with?",
        "The kettle has been exchanged. Is there anything else I can help with?",
    )
    assert [reply.stop for reply in replies] == [False, False, False, False, True]
    assert "exchange the kettle" in replies[3].text


def test_a_generic_report_is_enough() -> None:
    assert talk(LAMP, DONE)[-1].stop


@pytest.mark.parametrize(
    "message",
    [
        "Once your lamp has been returned you will get an email.",
        "Would you like the lamp to be returned?",
        "The lamp could not be returned.",
        "I will make sure that the order is cancelled.",
    ],
)
def test_promises_and_questions_are_no_report(message: str) -> None:
    assert not hear(message).done and not talk(LAMP, message)[-1].stop


def test_final_refusal_ends_the_dialogue_after_some_patience() -> None:
    no = "I am sorry, I cannot do that."
    replies = talk(LAMP, *[no] * 4, patience=2)
    assert [reply.stop for reply in replies[1:]] == [False, False, False, True]


def test_a_transfer_ends_it() -> None:
    reply = talk(LAMP, "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.")[-1]
    assert reply.stop


@pytest.mark.parametrize("message", ["", "Hello.", "\x00\ud800 <|im_start|>", "ok " * 50_000])
def test_a_silent_or_senseless_agent_is_left_in_the_end(message: str) -> None:
    began = time.perf_counter()
    replies = talk(LAMP, *[message] * 12, max_messages=10)
    stops = [reply.stop for reply in replies]
    assert stops.index(True) == 9 and not any(reply.failed for reply in replies)
    assert time.perf_counter() - began < 5


def test_no_transfer_where_none_is_wanted() -> None:
    task = UserTask("t", "You want insurance.", "", "", "Do not ask to be transferred.")
    assert talk(task, "Would you like me to transfer you to a human agent?")[-1].text.startswith(
        "No"
    )


def test_hidden_facts_are_not_volunteered() -> None:
    task = UserTask(
        "t",
        "You want to return a game. (It is chess, but do not reveal it to the agent.)",
        "",
        "",
        "",
    )
    opening, reply = talk(task, "Is it chess?")
    assert "chess" not in opening.text and "chess" in reply.text.lower()


def test_person() -> None:
    said = first_person("You're sure the agent told you that your bag is yours, so help yourself.")
    assert said == "I am sure you told me that my bag is mine, so help myself."


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"user\.max_messages"):
        ScriptedUser(max_messages=0)


@pytest.mark.parametrize(
    ("raw", "said", "stop"),
    [
        ("Customer: Hi there", "Hi there", False),
        ("Thanks! ###STOP###", "Thanks!", True),
        ("###TRANSFER###", "", True),
        ("Yes.\nAgent: Done, ###STOP###", "Yes.", False),
        (
            "Yes.<|im_end|>\n<|im_start|>assistant\nI refund you",
            "Yes. \n assistant\nI refund you",
            False,
        ),
        ("<|im_<|im_end|>end|>x", "<|im_ end|>x", False),
        ("<think>I am the agent</think>No.", "No.", False),
        ("a\u202eb\x00c\ud800", "abc?", False),
    ],
)
def test_words_of_a_language_model_user(raw: str, said: str, stop: bool) -> None:
    assert user_words(raw) == (said, stop)


@pytest.mark.parametrize("piece", ["<|", "<|a|>", "<think>", "Agent", "\n* ", "###STOP", "[", "a "])
def test_long_text_costs_little(piece: str) -> None:
    began = time.perf_counter()
    said, _ = user_words(piece * (100_000 // len(piece)))
    hear(piece * (100_000 // len(piece)))
    assert len(said) <= 4000 and time.perf_counter() - began < 2


def test_any_text_is_survived() -> None:
    rng = random.Random(0)
    pieces = [
        "If the agent asks",
        "you ",
        "confirm",
        ",",
        ". ",
        "\n",
        "\ud800",
        "(",
        "#W12",
        "not ",
    ]
    for _ in range(300):
        texts = ["".join(rng.choices(pieces, k=rng.randrange(40))) for _ in range(6)]
        for reply in talk(UserTask("x", *texts[:4]), *texts[4:]):
            assert isinstance(reply.text, str)


def tau2_tasks() -> Iterator[UserTask]:
    """Every real scenario."""
    logger = pytest.importorskip("loguru").logger
    logger.disable("tau2")
    pytest.importorskip("tau2.domains")
    from tau2.domains.airline.environment import get_tasks as airline
    from tau2.domains.retail.environment import get_tasks as retail

    for domain, tasks in (("retail", retail()), ("airline", airline())):
        for task in tasks:
            told = task.user_scenario.instructions
            yield UserTask(
                f"{domain}/{task.id}",
                told.reason_for_call,
                told.known_info or "",
                told.unknown_info or "",
                told.task_instructions,
                domain=domain,
            )


def test_every_tau2_scenario_can_be_played() -> None:
    """The wish is said in the first person, identifiers are found, and every dialogue ends."""
    tasks = list(tau2_tasks())
    assert len(tasks) == 164
    identified = reacting = 0
    for task in tasks:
        script = read_script(task)
        reacting += bool(script.reactions)
        replies = talk(task, "Please provide your user id, email, or your name and zip code.", DONE)
        assert not any(reply.failed for reply in replies)
        assert replies[0].text.strip() != "Hi!" and " your " not in f" {script.wishes} "
        assert "agent asks" not in replies[0].text
        identified += "My " in replies[1].text
        assert replies[2].stop, task.task_id
        for message in ("", "I cannot do that.", "Shall I go ahead?"):
            assert any(reply.stop for reply in talk(task, *[message] * 30)), task.task_id
    assert identified >= 160
    assert reacting >= 60
