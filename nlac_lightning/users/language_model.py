"""Users played by a language model, behind an endpoint or in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.endpoint.client import EndpointClient
from nlac_lightning.endpoint.config import EndpointConfig
from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError, require_choice, require_positive
from nlac_lightning.generation.base import Generator, Request, Sampling
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.codec import Codec, PlainCodec, make_codec
from nlac_lightning.users.base import UserReply, UserSession, UserTask
from nlac_lightning.users.text import END, neutralise, user_words

GUIDELINES = f"""\
You play a customer in a conversation with a customer service agent. You are never the agent.

How to speak:
- Write only the customer's next message: one or two natural sentences in your own words.
- Bring up your wish first. Give a detail from your situation when the agent asks for it or cannot \
go on without it, not everything at the start.
- Use only facts of your situation. If you are asked for anything else, or for what it says you do \
not know, answer that you do not know or do not remember. Invent nothing.
- Where your situation says how to react to something, do so when it happens, and not before.
- When the agent describes what it is going to do, compare it with your wish before you agree.

How to end:
- If everything you wanted has been done or definitely refused, and the agent has said so, write \
{END} after your last words. A promise to do something is not yet done: wait for it.
- If you are handed over to a human, write {END}.
- Never write {END} as long as the agent waits for your confirmation."""

GREETING = "Hi! How can I help you today?"


@dataclass(frozen=True)
class Said:
    """Raw text of a model, or why there is none."""

    text: str
    failed: str | None = None


Ask = Callable[[Sequence[Message], int], Said]


def system_prompt(task: UserTask) -> str:
    """Guidelines and situation of one customer."""
    parts = (
        ("Who you are", task.persona),
        ("Why you call", task.reason_for_call),
        ("What you know", task.known_info),
        ("What you do not know", task.unknown_info),
        ("How you behave and react", task.instructions),
    )
    situation = "\n".join(f"{name}: {text.strip()}" for name, text in parts if text.strip(" .\n"))
    return f"{GUIDELINES}\n\nYour situation:\n{situation}"


class LanguageModelSession:
    """One dialogue. The model sees it with roles flipped: the agent's words are what it answers.

    Args:
        ask: completes a conversation, given with the number of the message.
        task: who the customer is.
        greeting: the agent's first words, which the customer answers.
    """

    def __init__(self, ask: Ask, task: UserTask, greeting: str = GREETING) -> None:
        self._ask = ask
        self._greeting = greeting
        self._messages: list[Message] = [{"role": "system", "content": system_prompt(task)}]

    def open(self) -> UserReply:
        return self.reply(self._greeting)

    def reply(self, agent_message: str) -> UserReply:
        heard = neutralise(agent_message).strip() or "(no words)"
        self._messages.append({"role": "user", "content": heard})
        try:
            said = self._ask(self._messages, len(self._messages) // 2)
        except Exception as error:  # an engine may fail in ways of its own; the dialogue ends
            said = Said("", f"{type(error).__name__}: {error}")
        if said.failed is not None:
            return UserReply("", failed=said.failed)
        words, stop = user_words(said.text)
        if not words and not stop:
            return UserReply("", failed="empty: the model said nothing as the user")
        self._messages.append({"role": "assistant", "content": words or END})
        return UserReply(words, stop)

    def close(self) -> None:
        self._messages = self._messages[:1]


class EndpointUser:
    """A user behind an OpenAI-compatible server.

    Args:
        endpoint: the server; with ``cache`` a re-run of the same dialogues costs nothing.
        temperature: 0 makes equal dialogues equal where the server is deterministic.
        max_new_tokens: longest message.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    def __init__(
        self,
        endpoint: EndpointConfig | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 256,
    ) -> None:
        self.client = EndpointClient(endpoint or EndpointConfig())
        self.sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)

    def start(self, task: UserTask, seed: int) -> UserSession:
        def ask(messages: Sequence[Message], number: int) -> Said:
            answer = self.client.chat(messages, self.sampling, (seed * 1009 + number) % 2**31)
            return Said(answer.text, answer.failed)

        return LanguageModelSession(ask, task)


class LocalUser:
    """A user played by a model in this process.

    Args:
        backbone: its model; None shares the frozen base of the run's own policy, at no memory.
        temperature: 0 is greedy.
        max_new_tokens: longest message.
        max_tokens: longest conversation; beyond it the user fails, by name.
        format: ``chat``, ``plain`` or ``auto``, as for the roles.
    """

    def __init__(
        self,
        backbone: BackboneConfig | None = None,
        temperature: float = 0.7,
        max_new_tokens: int = 96,
        max_tokens: int = 8192,
        format: Literal["auto", "chat", "plain"] = "auto",
    ) -> None:
        require_choice("user.format", format, ("auto", "chat", "plain"))
        require_positive("user.max_tokens", max_tokens)
        self.backbone, self.format, self.max_tokens = backbone, format, max_tokens
        self.sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
        self._engine: tuple[Generator, Codec] | None = None

    def attach(self, generator: Generator, tokenizer: Any) -> None:
        """Share an engine, unless the user has a model of its own."""
        if self.backbone is None:
            self._engine = (generator, self._codec(tokenizer))

    def start(self, task: UserTask, seed: int) -> UserSession:
        generator, codec = self._loaded()
        sampling = replace(self.sampling, stop=codec.stop)

        def ask(messages: Sequence[Message], number: int) -> Said:
            # the codec encodes foreign text as text, so that no message can forge a turn
            named: list[Message] = [
                {**m, "name": "Agent"} if m["role"] == "user" else m for m in messages
            ]
            ids = codec.messages(named) + codec.header()
            if len(ids) + sampling.max_new_tokens > self.max_tokens:
                return Said("", f"length: the dialogue has {len(ids)} tokens")
            draw = (seed * 1009 + number) % 2**62
            request = Request(ids, sampling, "base", codec.stop_ids, seed=draw, extend=True)
            return Said(generator.generate([request])[0].text)

        return LanguageModelSession(ask, task)

    def _codec(self, tokenizer: Any) -> Codec:
        codec = make_codec(self.format, tokenizer)
        return PlainCodec(tokenizer, agent="Customer") if codec.kind == "plain" else codec

    def _loaded(self) -> tuple[Generator, Codec]:
        if self._engine is None:
            if self.backbone is None:
                raise ConfigError(
                    "user.backbone", "there is no model to share", "name one of the user's own"
                )
            own = Backbone(self.backbone)
            self._engine = (InProcessGenerator(own), self._codec(own.tokenizer))
        return self._engine
