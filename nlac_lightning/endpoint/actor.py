"""A model behind an endpoint as the policy: the ReAct prompt, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nlac_lightning.actors import Live
from nlac_lightning.endpoint.client import Answer, EndpointClient
from nlac_lightning.envs.base import Message
from nlac_lightning.generation.base import FAILED, Completion
from nlac_lightning.replay.episode import Episode
from nlac_lightning.roles.roles import Roles


class EndpointActor:
    """Chooses actions by asking a server with the policy's own prompt.

    Completions carry no log-probabilities, so their turns are stored as ``given`` and never taken
    for samples of the trained policy. An answer that cannot be had ends its episode
    (``policy_failed``).

    Args:
        client: the server.
        roles: the policy's instruction and sampling; the codec gives the ids that are stored.
        temperature: overrides the policy's; 0 is greedy.
    """

    version = 0

    def __init__(
        self, client: EndpointClient, roles: Roles, temperature: float | None = None
    ) -> None:
        self.client, self.roles = client, roles
        sampling = roles.settings("policy").sampling
        self.sampling = (
            sampling if temperature is None else replace(sampling, temperature=temperature)
        )
        self._instruction = roles.templates["policy"]

    def act(self, states: Sequence[Live]) -> list[Completion]:
        """One completion per running episode, all asked for side by side."""
        prompts = [self._prompt(live.messages) for live in states]
        seeds = [int(live.rng.integers(2**31)) for live in states]
        answers = self.client.chat_many(prompts, self.sampling, seeds)
        return [self._completion(answer) for answer in answers]

    def reflect(self, episodes: Sequence[Episode], instruction: str, seed: int) -> list[str]:
        """What to do differently, for each failed episode; empty where no answer was had."""
        prompts = [
            [*chat_messages(e.state_messages(len(e.turns))), _user(instruction)] for e in episodes
        ]
        answers = self.client.chat_many(prompts, self.sampling, [seed] * len(prompts))
        return [answer.text.strip() for answer in answers]

    def _prompt(self, messages: Sequence[Message]) -> list[Message]:
        heard = [m["content"] for m in messages if m["role"] not in ("system", "assistant")]
        fields = {
            "opening": heard[0] if heard else "",
            "observation": heard[-1] if heard else "",
            "agent": getattr(self.roles.codec, "agent", "Agent"),
        }
        text, _ = self._instruction.render(fields)
        asked = [_user(text)] if text.strip() else []
        return chat_messages(messages) + asked

    def _completion(self, answer: Answer) -> Completion:
        if answer.failed is not None:
            return Completion((), answer.failed, (), FAILED)
        given = self.roles.codec.given(answer.text)
        reason = "length" if answer.finish_reason == "length" else "stop"
        return replace(given, text=answer.text, finish_reason=reason)


def chat_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as any chat server takes them: tool results become user messages with a label."""
    out: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"[{message.get('name', 'tool')}] {content}"
        out.append(
            {"role": role if role in ("system", "assistant") else "user", "content": content}
        )
    return out


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
