"""From messages to token ids, piece by piece.

A state grows by appending the ids of new pieces, never by encoding the whole again. Text from
outside is encoded as plain text: a template's control tokens inside it do not become control
tokens, and in plain format a line break inside a message cannot open a forged turn.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion

Ids = tuple[int, ...]
_MARK = "\u2402MESSAGE\u2402"
_KEPT = 4096
"""Texts whose ids are kept: instructions and states come back many times in each step."""
_ENCODING = threading.Lock()
"""``split_special_tokens`` is a mode of the tokenizer, which codecs and threads share: one that
encodes a template's own tokens must not have another's foreign text encoded as such."""


class Codec(ABC):
    """How messages become ids for one tokenizer.

    Attributes:
        stop: strings that end the agent's turn.
        stop_ids: token ids that end it.
        fingerprint: identifies tokenizer and format; ids of another codec mean other texts.
    """

    kind: str
    stop: tuple[str, ...] = ()
    stop_ids: Ids = ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._kept: dict[tuple[str, bool], Ids] = {}
        vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode())
        vocabulary.update(f"{self.kind}{self._format()}".encode())
        self.fingerprint = f"{self.kind}-{vocabulary.hexdigest()[:12]}"

    def _format(self) -> str:
        return ""

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template where messages follow it."""
        return None

    def text(self, text: str, control: bool = False) -> Ids:
        """Ids of a text; control tokens in it count as such only with ``control``."""
        found = self._kept.get((text, control))
        if found is None:
            with _ENCODING:
                encoded = self.tokenizer(
                    clean(text), add_special_tokens=False, split_special_tokens=not control
                )
                if len(self._kept) >= _KEPT:
                    self._kept.clear()
                found = self._kept[text, control] = tuple(encoded["input_ids"])
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens shown."""
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def field(self, value: Any) -> Any:
        """A template field as it may stand in an instruction; texts (or a list of them) change."""
        return value

    def messages(self, messages: Sequence[Message]) -> Ids:
        """Ids of whole messages, each one closed."""
        return tuple(i for message in messages for i in self.message(message))

    @abstractmethod
    def message(self, message: Message) -> Ids:
        """Ids of one closed message."""

    @abstractmethod
    def header(self) -> Ids:
        """Ids that open the agent's turn."""

    @abstractmethod
    def close(self, completion: Completion) -> Ids:
        """Ids that have to follow a sampled completion to close the agent's turn."""

    @abstractmethod
    def given(self, action: str) -> Completion:
        """An action that was not sampled, as the completion that would have produced it."""

    @abstractmethod
    def instruction(self, text: str, prefill: str = "", system: bool = False) -> Ids:
        """Ids that ask for a role's answer after a state, up to where the answer starts.

        Args:
            text: the rendered role template.
            prefill: start of the answer that the model continues.
            system: nothing precedes, so the prompt opens the conversation itself.
        """


class PlainCodec(Codec):
    """Lines of text, ``Name: words``: what small models continue best."""

    kind = "plain"
    stop = ("\n",)

    def __init__(self, tokenizer: Any, agent: str = "Agent") -> None:
        self.agent = agent
        super().__init__(tokenizer)
        eos = tokenizer.eos_token_id
        self.stop_ids = (eos,) if eos is not None else ()

    def _format(self) -> str:
        return self.agent

    def field(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.field(item) for item in value]
        return one_line(value) if isinstance(value, str) else value

    def message(self, message: Message) -> Ids:
        if message["role"] == "system":
            return self.text(message["content"].strip() + "\n")
        name = message.get("name") or (
            self.agent if message["role"] == "assistant" else message["role"].capitalize()
        )
        return self.text(f"{name}: {one_line(message['content'])}\n")

    def header(self) -> Ids:
        return self.text(f"{self.agent}:")

    def close(self, completion: Completion) -> Ids:
        ended = completion.complete and "\n" in self.decode(completion.ids[-1:])
        return () if ended else self.text("\n")

    def given(self, action: str) -> Completion:
        line = one_line(action)
        return Completion(self.text(f" {line}\n"), line, (), "stop")

    def instruction(self, text: str, prefill: str = "", system: bool = False) -> Ids:
        return self.text(text) + self.text(prefill)


class ChatCodec(Codec):
    """The tokenizer's chat template, taken apart into what stands around each message."""

    kind = "chat"

    def __init__(self, tokenizer: Any) -> None:
        self._around = {role: _around(tokenizer, role) for role in ("user", "assistant")}
        self._around["system"] = _around_system(tokenizer)
        self._header = _header(tokenizer)
        super().__init__(tokenizer)
        self._ids = {
            role: (self.text(before, control=True), self.text(after, control=True))
            for role, (before, after) in self._around.items()
        }
        closing = self._ids["assistant"][1]
        if not closing:
            raise ConfigError(
                "model.roles.format", "the chat template does not close a message", "use plain"
            )
        self.stop_ids = tuple({closing[0], tokenizer.eos_token_id} - {None})
        _check_pieces(tokenizer, self)

    def _format(self) -> str:
        return repr(sorted(self._around.items())) + self._header

    @property
    def chat_template(self) -> str | None:
        return str(self.tokenizer.chat_template)

    def message(self, message: Message) -> Ids:
        role = message["role"] if message["role"] in self._ids else "user"
        content = message["content"]
        if message["role"] == "tool":
            content = f"[{message.get('name', 'tool')}] {content}"
        before, after = self._ids[role]
        return before + self.text(content) + after

    def header(self) -> Ids:
        return self.text(self._header, control=True)

    def close(self, completion: Completion) -> Ids:
        closing = self._ids["assistant"][1]
        ended = completion.ids and completion.ids[-1] in self.stop_ids
        return closing[1:] if ended else closing

    def given(self, action: str) -> Completion:
        return Completion(self.text(action) + self._ids["assistant"][1][:1], action, (), "stop")

    def instruction(self, text: str, prefill: str = "", system: bool = False) -> Ids:
        opening: Ids = ()
        if system:
            opening = self.message({"role": "system", "content": "You follow instructions."})
        turn = self.message({"role": "user", "content": text}) if text.strip() else ()
        return opening + turn + self.header() + self.text(prefill)


def clean(text: str) -> str:
    """Text without lone surrogates, which no tokenizer can encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def one_line(text: str) -> str:
    """Text on one line, as the plain format needs it."""
    return " ".join(text.split())


def _render(tokenizer: Any, messages: list[dict[str, str]], header: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)
    except Exception as error:  # a template may raise anything of its own
        raise ConfigError(
            "model.roles.format",
            f"the tokenizer's chat template fails ({error})",
            "use model.roles.format: plain",
        ) from error


_SYSTEM = {"role": "system", "content": _MARK}


def _around_system(tokenizer: Any) -> tuple[str, str]:
    before, _, after = _render(tokenizer, [_SYSTEM]).partition(_MARK)
    return before, after


def _around(tokenizer: Any, role: str) -> tuple[str, str]:
    # Templates may add a default system message or insist on a user turn first: both stand before.
    lead = [_SYSTEM] + ([{"role": "user", "content": "x"}] if role == "assistant" else [])
    start = _render(tokenizer, lead)
    both = _render(tokenizer, [*lead, {"role": role, "content": _MARK}])
    before, mark, after = both.removeprefix(start).partition(_MARK)
    if not both.startswith(start) or not mark:
        raise ConfigError(
            "model.roles.format",
            "the chat template changes earlier messages when one is appended",
            "use model.roles.format: plain",
        )
    return before, after


def _header(tokenizer: Any) -> str:
    lead = [_SYSTEM, {"role": "user", "content": "x"}]
    return _render(tokenizer, lead, header=True).removeprefix(_render(tokenizer, lead))


def _check_pieces(tokenizer: Any, codec: ChatCodec) -> None:
    """The pieces put together must read as the template's own rendering."""
    dialogue: list[Message] = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    whole = _render(tokenizer, [dict(message) for message in dialogue])  # type: ignore[arg-type]
    if codec.decode(codec.messages(dialogue)) != whole:
        raise ConfigError(
            "model.roles.format",
            "the chat template does more than wrap each message",
            "use model.roles.format: plain",
        )


def make_codec(kind: str, tokenizer: Any) -> Codec:
    """The codec called ``plain`` or ``chat``; ``auto`` takes chat where there is a template."""
    if kind == "auto":
        kind = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    if kind == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.roles.format", "the tokenizer has no chat template", "use plain")
    return ChatCodec(tokenizer) if kind == "chat" else PlainCodec(tokenizer)
