"""Text from models, users and tools that was made to harm: it is read, shown and stored as text.

``NLAC_EXAMPLES=10000`` runs as many examples of each property (``benchmarks/faults.py`` does).
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nlac_lightning import models
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.envs.tau2 import actions as tau2
from nlac_lightning.envs.twenty_questions.names import Names
from nlac_lightning.envs.twenty_questions.table import load_table
from nlac_lightning.evaluation.records import EpisodeRecord, EvaluationResult, StepRecord
from nlac_lightning.generation.base import Completion
from nlac_lightning.replay import Episode, ReplayBuffer, Turn
from nlac_lightning.report.text import SafeFormatter, visible
from nlac_lightning.report.transcripts import write_html, write_text
from nlac_lightning.roles.codec import ChatCodec, Codec, PlainCodec
from nlac_lightning.roles.roles import Roles, RolesConfig, find_verdict, split_thought
from nlac_lightning.rollout import Rollout, RolloutLimits
from nlac_lightning.users.asked import hear
from nlac_lightning.users.text import neutralise, user_words

EXAMPLES = settings(
    max_examples=int(os.environ.get("NLAC_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)

PIECES = [
    *("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "</s>", "[INST]"),
    *("<think>", "</think>", "Thought:", "Action:", "action : ", "**Action:**", "not ", "n't "),
    *("good", "bad", "<tool_call>", "</tool_call>", "```json\n{", "}\n```", "```", "}", "{"),
    *("Agent:", "\nCustomer: ", "System:", "user:", "###STOP###", "####", "## TRANSFER ##"),
    *("find(", ")", "order=", "refund 52 kettle", "get_order_details(order_id='#W1')", '"name"'),
    *("\x00", "\x07", "\x1b[31m", "\x85", "\u2028", "\u2029", "\r", "\n", "\r\n", "\x0b", "\t"),
    *("\ud800", "\udfff\ud800", "\u202e", "\u2066", "\ufeff", "\u200b", "e\u0301", "\U0001f642"),
    *("<script>alert(1)</script>", "&lt;", "<!--", "-->", "]]>", "</details>", "<img src=x>", '"'),
    *("'; DROP TABLE episodes; --", "{{ 7 * 7 }}", "{% for %}", "{0}", "%s", "%(x)s", "../../x"),
    "[" * 1000 + "]" * 1000,
    '{"name":' * 1000 + "1" + "}" * 1000,
    "(" * 300 + ")" * 300,
    "a" * 5000,
    " " * 5000,
    "#" * 5000,
]
HOSTILE = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(max_size=12), st.characters()), max_size=12
).map("".join)

TOOLS = {"get_order_details": {"properties": {"order_id": {"type": "string"}}}}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: str) -> Any:
    return models.load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def readers(tokenizer: Any) -> dict[str, Callable[[str], object]]:
    """Everything that reads a text from outside."""
    table = load_table()
    names = Names({name: [name] for name in table.objects})
    chat, plain = ChatCodec(tokenizer), PlainCodec(tokenizer)
    roles = Roles(RolesConfig(), tokenizer)
    desk = HelpDeskEnv(level=0, n_train=2, n_val=1, n_test=1)

    def call(text: str) -> object:
        try:
            return tau2.parse(text, TOOLS)
        except tau2.ActionError:
            return None

    return {
        "split_thought": split_thought,
        "find_verdict": find_verdict,
        "verdict": lambda text: roles.verdict(Completion((), text, (), "stop")),
        "tau2": call,
        "guess": names.guess,
        "ask": table.ask,
        "hear": hear,
        "neutralise": neutralise,
        "user_words": user_words,
        "visible": visible,
        "chat": lambda text: chat.message({"role": "user", "content": text}),
        "plain": lambda text: plain.message({"role": "user", "content": text}),
        "help desk": lambda text: desk.reset(desk.tasks("train")[0]).step(text),
    }


@EXAMPLES
@given(text=HOSTILE)
def test_no_reader_ever_raises(readers: dict[str, Callable[[str], object]], text: str) -> None:
    for read in readers.values():
        read(text)


def control_ids(codec: Codec, ids: tuple[int, ...]) -> Counter[int]:
    special = set(codec.tokenizer.all_special_ids)
    return Counter(i for i in ids if i in special)


@EXAMPLES
@given(text=HOSTILE, role=st.sampled_from(["user", "tool", "assistant", "system"]))
def test_no_text_opens_a_turn(
    tokenizer: Any, roles: dict[str, Roles], text: str, role: str
) -> None:
    message: Any = {"role": role, "content": text, "name": "ann"}
    chat, plain = roles["chat"].codec, roles["plain"].codec
    benign = control_ids(chat, chat.message({**message, "content": "hello"}))
    assert control_ids(chat, chat.message(message)) == benign
    for family in roles.values():
        codec = family.codec
        for name in ("successor", "evaluator", "refinement"):
            fields: dict[str, Any] = {"action": text}
            safe: dict[str, Any] = {"action": "hello"}
            if name == "evaluator":
                fields["descriptions"], safe["descriptions"] = [text], ["hello"]
            if name == "refinement":
                fields["critique"], safe["critique"] = text, "hello"
            asked = family.prompt(name, (), [message], **fields).ids
            expected = family.prompt(name, (), [{**message, "content": "hello"}], **safe).ids
            assert control_ids(codec, asked) == control_ids(codec, expected)
            if codec.kind == "plain":
                assert codec.decode(asked).count("\n") == codec.decode(expected).count("\n")
    if role != "system":
        shown = plain.decode(plain.message(message))
        assert shown.count("\n") == 1 and shown.endswith("\n")
        assert not re.search("[\r\x0b\x0c\x85\u2028\u2029]", shown)


@pytest.fixture(scope="module")
def roles(tokenizer: Any) -> dict[str, Roles]:
    return {
        "chat": Roles(RolesConfig(), tokenizer),
        "plain": Roles(
            RolesConfig(templates="help_desk_small", format="plain", action="plain"), tokenizer
        ),
    }


class Tags(HTMLParser):
    """The page's tags in order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[Any] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(tag)

    def handle_comment(self, data: str) -> None:
        self.tags.append("comment")

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def result(text: str) -> EvaluationResult:
    step = StepRecord(
        action=f"do {text}",
        completion=f"did {text}",
        critique=f"bad {text}",
        description=f"then {text}",
        verdict=False,
        score=0.5,
        right=False,
        valid=True,
        refined_action=f"instead {text}",
        refined_right=True,
        reply=f"user: {text}",
    )
    opening: list[Any] = [{"role": "user", "content": f"open {text}", "name": f"n {text}"}]
    episode = EpisodeRecord(
        f"task {text}", "test", "trained", True, 1.0, [step], f"why {text}", 3, opening
    )
    return EvaluationResult("trained", "test", [episode], f"env {text}")


@EXAMPLES
@given(text=HOSTILE)
def test_transcripts_and_logs_show_text_as_text(tmp_path_factory: Any, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    pages = []
    for said in (text, "x"):
        write_html(folder / "page.html", result(said))
        pages.append(Tags((folder / "page.html").read_text("utf-8")))
    assert pages[0].tags == pages[1].tags
    assert f"then {visible(text)}" in "".join(pages[0].said)
    write_text(folder / "page.txt", result(text))
    lines = (folder / "page.txt").read_text("utf-8").split("\n")
    assert sum(line.startswith("=== ") for line in lines) == 1
    record = logging.LogRecord("a", 30, "f", 1, "task failed: %s", (text,), None)
    line = SafeFormatter("%(message)s").format(record)
    line.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", line)
    assert all(part.startswith("  | ") for part in line.split("\n")[1:])


@EXAMPLES
@given(text=HOSTILE, info=st.recursive(st.none() | HOSTILE, st.lists, max_leaves=5))
def test_the_buffer_gives_back_what_it_was_given(
    tmp_path_factory: Any, text: str, info: Any
) -> None:
    """Two lone surrogates that make a pair are the one character that they stand for."""
    text = json.loads(json.dumps(text))
    info = json.loads(json.dumps(info))
    turn = Turn(text, text, (1, 2), 0, 1, (-0.5,), "stop", 0, False, [], 0.0, True, False)
    replies: list[Any] = [{"role": "tool", "content": text, "name": text}]
    turn = replace(turn, replies=replies, info={"said": info, text: 1})
    episode = Episode("e", "t", "train", 0, "c", replies, (1,), [turn], "done")
    path: Path = tmp_path_factory.getbasetemp() / "hostile.sqlite"
    with ReplayBuffer(path, capacity=20) as buffer:
        number = buffer.append(episode)
        assert buffer.episode(number) == episode
        if number % 50 == 0:
            assert buffer.problems() == []


@pytest.mark.parametrize("text", ["'; DELETE FROM episodes; --", '" OR 1=1', "x'00'", "?1"])
def test_no_text_is_read_as_sql(tmp_path: Path, text: str) -> None:
    turn = Turn("a", "a", (1,), 0, 1, (), "given", 0, False, [], 0.0, True, False)
    episode = Episode(text, text, text, 0, text, [], (1,), [turn], text)
    with ReplayBuffer(tmp_path / "a.sqlite", codec=text, env=text) as buffer:
        buffer.append_many([episode, episode])
        assert list(buffer.iter_episodes()) == [episode, episode]
        assert len(buffer.index(exclude=[text]).ids) == 0 and buffer.outcomes([text]) == []
        assert buffer.outcomes()[0].task_id == text and buffer.stats().reasons == {text: 2}


@pytest.mark.parametrize(
    "unit",
    [
        "#",
        "# ",
        "```{",
        "```json\n{}",
        "} ``",
        "<think>",
        "<tool_call>",
        "Action",
        "Action ",
        "action:\n",
        "*",
        " ",
        "\n",
        "not ",
        "n't a b ",
        "no\t",
        "a",
        "a(",
        "x(y)) ",
        "{",
        "[",
        '{"name":',
        "<|",
        "<|im_end|>",
        "guess ",
        "is it ",
        "not red or ",
        "please? ",
        "yes no ",
        "\x00",
        "\ud800",
        "\u202e",
        "é",
    ],
)
def test_time_grows_with_the_length_alone(
    readers: dict[str, Callable[[str], object]], unit: str
) -> None:
    """A line of 100 kB takes at most some times what one of 12.5 kB takes."""
    for name, read in readers.items():
        short, long = (unit * (n // len(unit)) + " good" for n in (12_500, 100_000))
        spent = cpu_seconds(lambda read=read, text=long: read(text))
        if spent < 0.1:
            continue
        fair = min(cpu_seconds(lambda read=read, text=short: read(text)) for _ in range(3))
        spent = min(spent, cpu_seconds(lambda read=read, text=long: read(text)))
        assert spent < 24 * fair + 0.1, f"{name}: {fair:.3f} s, then {spent:.3f} s"
        assert spent < 5, name


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def test_deep_json_in_what_an_environment_says_ends_that_episode_alone(
    roles: dict[str, Roles],
) -> None:
    desk = HelpDeskEnv(level=0, n_train=2, n_val=1, n_test=1)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    bad = [{"deep": deep}, {"set": {1}}, {b"key": 1}]

    class Env(HelpDeskEnv):
        def reset(self, task: Any, seed: int = 0) -> Any:
            session = super().reset(task, seed)
            step = session.step
            session.step = lambda action: replace(step(action), info=bad[seed])
            return session

    rollout = Rollout(
        Env(level=0, n_train=2, n_val=1, n_test=1), roles["plain"], RolloutLimits(max_turns=2)
    )

    class Says:
        version = 0

        def act(self, states: Any) -> list[Completion]:
            return [Completion((5,), "find 52", (-1.0,), "stop") for _ in states]

    jobs = [(desk.tasks("train")[0], n) for n in range(3)]
    episodes = list(rollout.play(jobs, Says()))
    assert [e.reason for e in episodes] == ["env_error"] * 3
    json.dumps([turn.info for e in episodes for turn in e.turns])
    while deep:  # such a list cannot even be freed at once
        deep = deep.pop()
