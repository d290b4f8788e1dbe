"""Reading an action: one tool call, or one message to the customer.

A call may be written in three ways, each of which some family of models prefers::

    <tool_call>{"name": "get_order_details", "arguments": {"order_id": "#W1"}}</tool_call>
    ```json
    {"name": "get_order_details", "arguments": {"order_id": "#W1"}}
    ```
    get_order_details(order_id="#W1")

Everything else is a message.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlac_lightning.roles.roles import split_thought

MAX_CHARS = 20_000
"""Longer actions are refused unread."""
MAX_EXPRESSION = 100
"""Characters of an expression for ``calculate``."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```[a-z_]*\s*(?=\{)")
_FENCE_END = re.compile(r"(?<=\})\s*```")
_NAMED = re.compile(r"([A-Za-z_]\w*)\s*\(.*\)\s*;?", re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class ActionError(ValueError):
    """An action that cannot be carried out; the message tells the model what is wrong."""


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]

    def text(self, style: str = "tool_call") -> str:
        """The call as an action, written in one of :data:`STYLES`."""
        if style == "call":
            arguments = ", ".join(f"{k}={_dump(v)}" for k, v in self.arguments.items())
            return f"{self.name}({arguments})"
        data = _dump({"name": self.name, "arguments": self.arguments})
        return f"```json\n{data}\n```" if style == "json" else f"<tool_call>\n{data}\n</tool_call>"


@dataclass(frozen=True)
class Speech:
    """A message to the customer."""

    text: str


STYLES = ("tool_call", "json", "call")
"""Ways to write a call; all are read, one is taught."""


def native_style(chat_template: str | None) -> str:
    """The style that a tokenizer's chat template shows its model was trained with."""
    if not chat_template:
        return "call"
    return "tool_call" if "tool_call" in chat_template else "json"


def parse(action: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | Speech:
    """Read an action; of a thought in it nothing is kept.

    Args:
        action: what the model wrote.
        tools: JSON schema of each tool's parameters.

    Raises:
        ActionError: nothing to do, more than one call, a call that cannot be read, an unknown
            tool, or arguments that are missing, unknown or of a wrong type.
    """
    if len(action) > MAX_CHARS:
        raise ActionError(f"The action is too long: more than {MAX_CHARS} characters.")
    text = split_thought(action)[1]
    if not text:
        raise ActionError("The action is empty: write a tool call or a message to the customer.")
    found = _TAGGED.findall(text) or _fenced(text)
    if not found and text.startswith("{") and '"name"' in text:
        found = [text]
    if len(found) > 1:
        raise ActionError(f"{len(found)} tool calls at once: make one call, then wait for it.")
    if found:
        call = _from_json(found[0])
    else:
        named = _NAMED.fullmatch(text)
        if not named or not (named[1] in tools or "_" in named[1]):
            return Speech(text)
        call = _from_source(text.rstrip("; \n"))
    _check(call, tools)
    return call


def _fenced(text: str) -> list[str]:
    """JSON objects in fences; one pass, since a lazy pattern rereads the text from every fence."""
    found, at = [], 0
    while opening := _FENCE.search(text, at):
        end = _FENCE_END.search(text, opening.end())
        if end is None:
            break
        found.append(text[opening.end() : end.start()])
        at = end.end()
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # Python reads escaped surrogates otherwise


def _from_json(text: str) -> Call:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ActionError(f"The tool call is not valid JSON: {error}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ActionError('The tool call needs a "name" and "arguments".')
    arguments = data.get("arguments", data.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ActionError('"arguments" has to be a JSON object.')
    return Call(data["name"], arguments)


def _from_source(text: str) -> Call:
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("not a call")
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("give each argument by its name")
        arguments = {
            str(k.arg): ast.literal_eval(_JsonNames().visit(k.value)) for k in node.keywords
        }
        json.dumps(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ActionError(
            f"The tool call cannot be read ({reason}). Write it as name(argument=value)."
        ) from error
    return Call(node.func.id, arguments)


class _JsonNames(ast.NodeTransformer):
    """``true``, ``false`` and ``null``, which models mix into Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _check(call: Call, tools: Mapping[str, Mapping[str, Any]]) -> None:
    if call.name not in tools:
        raise ActionError(f"There is no tool '{call.name}'. Tools: {', '.join(sorted(tools))}.")
    schema = tools[call.name]
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in call.arguments]
    if missing:
        raise ActionError(f"{call.name} needs the argument {', '.join(missing)}.")
    unknown = [name for name in call.arguments if name not in properties]
    if unknown:
        raise ActionError(f"{call.name} has no argument {', '.join(unknown)}.")
    for name, value in call.arguments.items():
        kind = properties[name].get("type")
        wanted = _TYPES.get(kind, object)
        if not isinstance(value, wanted) or (
            isinstance(value, bool) and kind != "boolean" and kind
        ):
            raise ActionError(f"{call.name}: {name} has to be of type {kind}.")


def guard(call: Call) -> str | None:
    """Why a call must not reach its tool: ``calculate`` hangs on towers of powers."""
    if call.name != "calculate":
        return None
    expression = str(call.arguments.get("expression", ""))
    if "**" in expression.replace(" ", ""):
        return "Error: powers are not supported"
    if len(expression) > MAX_EXPRESSION:
        return f"Error: the expression is longer than {MAX_EXPRESSION} characters"
    return None
