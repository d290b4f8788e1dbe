"""One dialogue: reads actions, runs tools, passes messages on, scores the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nlac_lightning.envs.base import Message, Session, Step
from nlac_lightning.envs.tau2.actions import ActionError, Call, guard, parse
from nlac_lightning.envs.tau2.domain import Domain, respond
from nlac_lightning.envs.tau2.prompt import shortened
from nlac_lightning.envs.tau2.tasks import TauTask
from nlac_lightning.users.base import UserReply, UserSession

TRANSFER = "transfer_to_human_agents"
DONE = "Your request has been completed."
ANYTHING_ELSE = "Is there anything else I can help you with?"


@dataclass(frozen=True)
class View:
    """How a dialogue looks to the agent.

    Attributes:
        system: the system prompt.
        style: how calls are written.
        max_result_chars, max_user_chars: longer tool results and user messages are cut in what
            the model sees; the score is taken from the whole ones. None cuts nothing.
        transfer_ends: a transfer to a human ends the dialogue, as in the original tau-bench. In
            tau2 only the user ends it, which is the default: an agent that may end it can earn
            the tasks in which nothing has to be done by giving up.
    """

    system: str
    style: str = "tool_call"
    max_result_chars: int | None = None
    max_user_chars: int | None = None
    transfer_ends: bool = False


class Tau2Session(Session):
    """A dialogue with one customer about one task.

    The reward is 1 if, when the user ends the dialogue, the database is as after the gold actions
    and everything was told that had to be; an episode that ends otherwise earns 0.

    ``Step.info`` holds ``valid`` (the action could be read), ``error`` (what was wrong with it or
    what its tool objected, else None), ``kind`` (``tool``, ``message``, ``invalid``), ``tool``
    (its name or None), ``tool_error``; the last one ``reason``: ``solved``, ``wrong_outcome`` or
    ``user_failed`` (no reply could be had from the user; why is in ``error``).
    """

    def __init__(self, domain: Domain, task: TauTask, user: UserSession, view: View) -> None:
        self.domain, self.task, self.user, self.view = domain, task, user, view
        self.environment = domain.environment()
        self.ended = False
        self._log: list[tuple[str, Any]] = []
        self._gold_played = 0
        self._first = user.open()
        self._heard(self._first)
        self.opening = [
            {"role": "system", "content": view.system},
            self._user_message(self._first),
        ]

    def step(self, action: str) -> Step:
        """Carry out one action."""
        if self.ended:
            over = {"valid": False, "error": "the dialogue is over", "kind": "invalid"}
            return Step([], terminated=True, info=over)
        if self._first.failed or self._first.stop:  # over before it began
            return self._close([], self._first, {"valid": True, "error": None, "kind": "message"})
        info: dict[str, Any] = {"valid": True, "error": None, "tool": None, "tool_error": False}
        try:
            read = parse(action, self.domain.parameters)
        except ActionError as error:
            info |= {"valid": False, "error": str(error), "kind": "invalid"}
            return Step([self._tool_message("error", str(error))], info=info)
        if isinstance(read, Call):
            return self._run(read, info | {"kind": "tool", "tool": read.name})
        self._log.append(("assistant", read.text))
        reply = self.user.reply(read.text)
        self._heard(reply)
        return self._close([self._user_message(reply)], reply, info | {"kind": "message"})

    def _run(self, call: Call, info: dict[str, Any]) -> Step:
        if call in self.task.gold[self._gold_played :][:1]:
            self._gold_played += 1
        refusal = guard(call)
        if refusal is None:
            result = respond(self.environment, call, f"call_{len(self._log)}")
            self._log.append(("call", (call, result)))
            content, failed = result.content or "", bool(result.error)
        else:
            content, failed = refusal, True
        if failed:
            info |= {"tool_error": True, "error": content}
        messages = [self._tool_message(call.name, content)]
        if call.name == TRANSFER and self.view.transfer_ends:
            return self._close(messages, UserReply("", stop=True), info)
        return Step(messages, info=info)

    def _close(self, messages: list[Message], reply: UserReply, info: dict[str, Any]) -> Step:
        """The step that a user's reply makes: the last one if the user failed or has left."""
        if reply.failed is not None:
            self.ended = True
            reason = {"reason": "user_failed", "error": reply.failed}
            return Step([], truncated=True, info=info | reason)
        if not reply.stop:
            return Step(messages, info=info)
        self.ended = True
        reward = self.reward()
        info["reason"] = "solved" if reward > 0 else "wrong_outcome"
        return Step(messages, reward, terminated=True, info=info)

    def reward(self) -> float:
        """1.0 if database and communicated facts are right as things stand, else 0.0."""
        if self.domain.fingerprint(self.environment) != self.domain.gold(self.task).fingerprint:
            return 0.0
        said = [str(text).lower().replace(",", "") for who, text in self._log if who == "assistant"]
        told = all(any(fact.lower() in text for text in said) for fact in self.task.communicate)
        return float(told)

    def trajectory(self) -> list[Any]:
        """The dialogue as tau2 messages, whole and without thoughts, for tau2's own evaluators."""
        from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage

        messages: list[Any] = []
        for who, what in self._log:
            if who == "call":
                call, result = what
                made = ToolCall(id=result.id, name=call.name, arguments=call.arguments)
                messages += [AssistantMessage(role="assistant", tool_calls=[made]), result]
            elif who == "assistant":
                messages.append(AssistantMessage(role="assistant", content=what))
            else:
                messages.append(UserMessage(role="user", content=what))
        return messages

    def oracle_action(self) -> str | None:
        """The next gold call; after the last one, the facts to tell, until the user leaves."""
        if self.ended:
            return None
        for call in self.task.gold[self._gold_played :]:
            return call.text(self.view.style)
        facts = ", ".join(self.task.communicate)
        told = f" For your information: {facts}." if facts else ""
        return f"{DONE}{told} {ANYTHING_ELSE}"

    def close(self) -> None:
        """Let go of the user."""
        self.user.close()

    def _heard(self, reply: UserReply) -> None:
        if reply.failed is None:
            self._log.append(("user", reply.text))

    def _user_message(self, reply: UserReply) -> Message:
        text = shortened(reply.text, self.view.max_user_chars)
        return {"role": "user", "content": text, "name": "Customer"}

    def _tool_message(self, name: str, content: str) -> Message:
        text = shortened(content, self.view.max_result_chars)
        return {"role": "tool", "content": text, "name": name}
