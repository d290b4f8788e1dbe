"""Reading actions: three ways to write a call, errors in words, nothing of the thought."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlac_lightning.envs.tau2.actions import (
    STYLES,
    ActionError,
    Call,
    Speech,
    guard,
    native_style,
    parse,
)

TOOLS: dict[str, dict[str, Any]] = {
    "get_order": {"properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
    "pay": {
        "properties": {
            "amount": {"type": "number"},
            "items": {"type": "array"},
            "note": {"type": "string"},
            "gift": {"type": "boolean"},
            "to": {"anyOf": [{"type": "object"}]},
        },
        "required": ["amount"],
    },
    "list_all": {"properties": {}},
}
ORDER = Call("get_order", {"order_id": "#W1"})


@pytest.mark.parametrize(
    "action",
    [
        '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n</tool_call>',
        '<tool_call>{"name": "get_order", "arguments": {"order_id": "#W1"}}',
        '```json\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n```',
        '```\n{"name": "get_order", "arguments": {"order_id": "#W1"}}```',
        '{"name": "get_order", "parameters": {"order_id": "#W1"}}',
        'get_order(order_id="#W1")',
        "get_order( order_id = '#W1' );",
        'I look.\n<tool_call>{"name": "get_order", "arguments": {"order_id": "#W1"}}</tool_call>',
        'Thought: look.\nAction: get_order(order_id="#W1")',
        '<think>pay(amount=3)</think>get_order(order_id="#W1")',
    ],
)
def test_the_ways_to_write_a_call(action: str) -> None:
    assert parse(action, TOOLS) == ORDER


def test_json_words_in_a_call() -> None:
    call = parse('pay(amount=3, gift=true, items=["a"], to={"x": null})', TOOLS)
    assert call == Call("pay", {"amount": 3, "gift": True, "items": ["a"], "to": {"x": None}})
    assert parse("list_all()", TOOLS) == Call("list_all", {})


@pytest.mark.parametrize(
    "action", ["Hello (see below)", "Is $5 (or more) fine?", "Refund: {5}", "Yes.", "f(x) is y"]
)
def test_everything_else_is_a_message(action: str) -> None:
    assert parse(action, TOOLS) == Speech(action)


def test_a_thought_reaches_nobody() -> None:
    assert parse("<think>They lie.</think>Hello.", TOOLS) == Speech("Hello.")
    assert parse("Thought: they lie.\nAction: Hello.", TOOLS) == Speech("Hello.")
    with pytest.raises(ActionError, match="empty"):
        parse("Thought: they lie.", TOOLS)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("", "empty"),
        ("x" * 30_000, "too long"),
        ('<tool_call>{"name": "get_order", </tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", '"name"'),
        ('<tool_call>{"name": "get_order", "arguments": "x"}</tool_call>', "JSON object"),
        ("<tool_call>" + "[" * 9000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", "2 tool calls"),
        ("get_order('#W1')", "by its name"),
        ("get_order(order_id=__import__('os').getcwd())", "cannot be read"),
        ("get_order(order_id=" + "(" * 3000 + ")" * 3000 + ")", "cannot be read"),
        ("get_order(order_id={1, 2})", "cannot be read"),
        ("get_order(order_id=", None),
        ("get_orders(order_id='1')", "no tool 'get_orders'"),
        ("get_order()", "needs the argument order_id"),
        ("get_order(order_id='1', zip='2')", "no argument zip"),
        ("get_order(order_id=1)", "of type string"),
        ("pay(amount=true)", "of type number"),
        ("pay(amount='3')", "of type number"),
    ],
)
def test_malformed_calls_say_what_is_wrong(action: str, words: str | None) -> None:
    if words is None:  # not even a call
        assert parse(action, TOOLS) == Speech(action)
        return
    with pytest.raises(ActionError, match=words):
        parse(action, TOOLS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # a busy machine is no fault of the parser
@given(st.text(st.characters(exclude_categories=["Cs"])), VALUES, st.sampled_from(STYLES))
def test_what_is_written_is_read_again(note: str, to: Any, style: str) -> None:
    call = Call("pay", {"amount": 1.5, "note": note, "to": to})
    text = call.text(style)
    if any(mark in note + json.dumps(to) for mark in ("<", "`", "ction", "hought", ";")):
        return  # marks of its own inside an argument
    assert parse(text, TOOLS) == call


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert isinstance(parse(text, TOOLS), Call | Speech)
    except ActionError as error:
        assert str(error)


def test_the_template_decides_the_style() -> None:
    assert native_style("{% if tools %}<tool_call>{% endif %}") == "tool_call"
    assert native_style("{{ messages[0].content }}") == "json"
    assert native_style(None) == "call"


def test_calculate_is_guarded() -> None:
    for bad in ("9**9**9", "9* *9", "1" * 200):
        assert guard(Call("calculate", {"expression": bad}))
    assert guard(Call("calculate", {"expression": "(1 + 2) * 3"})) is None
    assert guard(Call("get_order", {"order_id": "**"})) is None
