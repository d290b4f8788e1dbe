"""The system prompt: the domain's policy, its tools, and how to use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

FORMATS = {
    "tool_call": """\
<tool_call>
{"name": "tool_name", "arguments": {"argument": "value"}}
</tool_call>""",
    "json": """\
```json
{"name": "tool_name", "arguments": {"argument": "value"}}
```""",
    "call": 'tool_name(argument="value")',
}
"""How a call is written, by style."""

_HOW = """\
# How to act

You talk with one customer. Each of your steps is either one tool call or one message to the
customer, never both. A tool call is written like this, with nothing before or after it:
{call}
Its result is shown to you and not to the customer. Anything that is not a tool call is sent to the
customer as it stands. Only the customer ends the conversation."""


def system_prompt(
    policy: str, schemas: Sequence[dict[str, Any]], style: str, slim: bool = False
) -> str:
    """Policy, tools and instructions.

    Args:
        policy: the domain's rules.
        schemas: OpenAI schemas of the tools.
        style: how calls are to be written, one of :data:`~.actions.STYLES`.
        slim: one line per tool instead of its whole schema; less than half the tokens.
    """
    tools = [_signature(s["function"]) if slim else json.dumps(s) for s in schemas]
    if not slim:
        tools = ["<tools>", *tools, "</tools>"]
    how = _HOW.format(call=FORMATS[style])
    return "\n\n".join([policy.strip(), "# Tools", "\n".join(tools), how])


def _signature(function: dict[str, Any]) -> str:
    """``name(a: string, b: list of {c, d}, e: string?): first line of the description``."""
    schema = function["parameters"]
    required, records = schema.get("required", ()), schema.get("$defs", {})
    arguments = [
        f"{name}: {_kind(value, records)}" + ("" if name in required else "?")
        for name, value in schema.get("properties", {}).items()
    ]
    summary = function["description"].strip().split("\n")[0].strip()
    return f"- {function['name']}({', '.join(arguments)}): {summary}"


def _kind(schema: dict[str, Any], records: dict[str, Any]) -> str:
    for choice in [schema, *schema.get("anyOf", ())]:
        if "$ref" in choice:
            fields = records[choice["$ref"].rpartition("/")[2]].get("properties", {})
            return "{" + ", ".join(fields) + "}"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), records)}"
    return str(schema.get("type", "any"))


def shortened(text: str, limit: int | None) -> str:
    """``text`` cut in its middle to about ``limit`` characters, saying how much is left out."""
    if limit is None or len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head} [... {len(text) - len(head) - len(tail)} characters left out ...] {tail}"
