"""The scripted user on tasks in the manner of tau2's, written for these tests."""

import re

import pytest

from nlac_lightning.users.base import UserTask
from nlac_lightning.users.scripted import ScriptedUser
from nlac_lightning.users.wording import first_person, wishes

TASK = UserTask(
    task_id="a",
    reason_for_call=(
        "You received your order #W1234567 and want to exchange the lamp for a bigger one. If that "
        "is not possible, you want to return the lamp."
    ),
    known_info="You are Ada Park in zip code 60601.",
    unknown_info="You do not remember your email address.",
    instructions=(
        "You also want to know the tracking number of the order. If the agent asks for "
        "confirmation, ask for the price first. You are a shy person."
    ),
)


def session(task: UserTask = TASK):
    started = ScriptedUser().start(task, 0)
    return started, started.open()


def test_it_opens_with_the_reason_and_keeps_conditions_back() -> None:
    _, first = session()
    assert "I received my order #W1234567" in first.text
    assert "exchange the lamp" in first.text and "return" not in first.text
    assert not first.stop and first.failed is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("What is your zip code?", "60601"),
        ("May I have your full name, please?", "Ada Park"),
        ("Which order is it about?", "#W1234567"),
        ("Please provide your email address.", "do not remember my email"),
        ("Could you tell me your user id?", "do not have my user id"),
    ],
)
def test_it_answers_what_it_is_asked(asked: str, words: str) -> None:
    assert words in session()[0].reply(asked).text


def test_it_never_tells_what_it_does_not_know() -> None:
    user, _ = session()
    for asked in ("Your email?", "Please provide your email.", "Your user id?"):
        assert "@" not in user.reply(asked).text


def test_plain_conditions_are_followed_once() -> None:
    user, _ = session()
    asked = "I would exchange the lamp with credit card 1. Do you confirm (yes/no)?"
    assert user.reply(asked).text == "Ask for the price first."
    assert user.reply(asked).text == "Yes, please go ahead."
    assert "I want to return the lamp" in user.reply("Sorry, the exchange is not possible.").text


def test_it_does_not_stop_before_all_is_told_and_done() -> None:
    user, _ = session()
    replies = [user.reply("Is there anything else I can help you with?") for _ in range(6)]
    stops = [reply.stop for reply in replies]
    assert "tracking number" in replies[0].text
    assert stops.index(True) == 3, "one wish, then two reminders of the reason"
    user, _ = session()
    user.reply("Anything else?")
    assert user.reply("Your exchange has been processed. Anything else?").stop


def test_a_transfer_ends_the_dialogue() -> None:
    assert session()[0].reply("YOU ARE BEING TRANSFERRED TO A HUMAN AGENT.").stop


def test_equal_dialogues_get_equal_replies() -> None:
    messages = ["Your name?", "Do you confirm?", "Not possible.", "Hm?", "Anything else?"]
    one, two = session()[0], ScriptedUser().start(TASK, 7)
    assert [one.reply(m) for m in messages] == [two.reply(m) for m in messages]


def test_stage_directions_are_not_spoken() -> None:
    assert wishes(TASK.instructions) == ["You also want to know the tracking number of the order."]
    user, first = session()
    said = [first.text] + [user.reply(m).text for m in ("Hm?", "So?", "What?", "Which?")]
    assert not any("shy" in text or "agent" in text for text in said)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("You are Ada. Your zip is 1.", "I am Ada. My zip is 1."),
        ("you want the agent to give you your money", "I want you to give me my money"),
        ("You've lost it yourself; it was yours.", "I've lost it myself; it was mine."),
    ],
)
def test_second_person_becomes_first(told: str, said: str) -> None:
    assert first_person(told) == said


def test_real_tasks_are_spoken_in_the_first_person() -> None:
    retail = pytest.importorskip("tau2.domains.retail.environment", reason="needs the extra [tau]")
    for task in retail.get_tasks():
        told = task.user_scenario.instructions
        user, first = session(
            UserTask(
                task.id,
                told.reason_for_call,
                told.known_info or "",
                told.unknown_info or "",
                told.task_instructions or "",
            )
        )
        assert not re.search(r"\byou (want|are|need)\b", first.text, re.IGNORECASE), first.text
        for _ in range(8):
            last = user.reply("Your request has been processed. Anything else?")
            if last.stop:
                break
        assert last.stop
