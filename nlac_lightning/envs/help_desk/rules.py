"""The rules of the desk: how each command changes the state, and what is still to be done.

States are immutable, so trying an action is as cheap as taking it and never touches the dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nlac_lightning.envs.base import Message
from nlac_lightning.envs.help_desk.commands import Command
from nlac_lightning.envs.help_desk.levels import Level
from nlac_lightning.envs.help_desk.wording import DONE, QUESTIONS, WANTS, phrase, topic_asked
from nlac_lightning.envs.help_desk.world import Order, Request, Scenario, Write

_IDENTIFY = ("say", "find", "verify")
"""Names of the steps that come before a request is dealt with."""


@dataclass(frozen=True)
class State:
    """Where a dialogue stands.

    Attributes:
        order: the database row as it is now.
        found, verified: the customer's order is known, and is the customer's.
        asked: topics that the customer has answered.
        agreed: writes that the customer has said yes to.
        current: index of the open request; the number of requests when all are dealt with.
        spoiled: something false was told or something forbidden was done.
        closed: the customer has left.
    """

    order: Order
    found: bool = False
    verified: bool = False
    asked: frozenset[str] = frozenset()
    agreed: frozenset[Write] = frozenset()
    current: int = 0
    spoiled: bool = False
    closed: bool = False


@dataclass(frozen=True)
class Outcome:
    """What an action leads to; ``problem`` says why it makes no progress (else None)."""

    state: State
    messages: list[Message]
    problem: str | None = None


def desk_says(text: str) -> Message:
    """A tool's reply."""
    return {"role": "tool", "name": "Desk", "content": text}


def customer_says(text: str) -> Message:
    """A customer's words."""
    return {"role": "user", "name": "Customer", "content": text}


class Desk:
    """The rules of one scenario at one level."""

    def __init__(self, level: Level, scenario: Scenario) -> None:
        self.level, self.scenario = level, scenario
        gold = scenario.order
        for request in scenario.requests:
            if self.refusal(request) is None:
                for write in request.writes:
                    gold = write.apply(gold)
        self._gold = gold

    def start(self) -> State:
        """The state in which a dialogue opens."""
        return State(self.scenario.order)

    def solved(self, state: State) -> bool:
        """Whether the database is as it should be and all that had to be told was told."""
        return not self.open_request(state) and not state.spoiled and state.order == self._gold

    def refusal(self, request: Request) -> str | None:
        """Why this request must be refused, or None."""
        return request.refusal(self.scenario.order) if self.level.policy else None

    def open_request(self, state: State) -> Request | None:
        """The request that the customer has made last, unless it is dealt with."""
        requests = self.scenario.requests
        return requests[state.current] if state.current < len(requests) else None

    def hidden_topic(self, state: State, request: Request) -> str | None:
        """What the customer has not yet told about a request."""
        topic = self.level.hidden.get(request.intent)
        return topic if topic not in state.asked else None

    def plan(self, state: State) -> list[Command]:
        """The shortest way to finish, as if nothing had gone wrong; empty when closed."""
        if state.closed:
            return []
        steps = []
        order = self.scenario.order
        for topic, step, done in (
            ("order", Command("find", (order.number,)), state.found),
            ("zip", Command("verify", (order.zip,)), state.verified),
        ):
            if not (done or self.level.ids_first or topic in state.asked):
                steps.append(Command("say", (QUESTIONS[topic],)))
            if not done:
                steps.append(step)
        for request in self.scenario.requests[state.current :]:
            if hidden := self.hidden_topic(state, request):
                steps.append(Command("say", (QUESTIONS[hidden],)))
            steps += self._request_steps(state, request)
        return [*steps, Command("close")]

    def _request_steps(self, state: State, request: Request) -> list[Command]:
        if request.intent == "question":
            return [Command("tell", (self.scenario.order.status,))]
        if reason := self.refusal(request):
            return [Command("refuse", (reason,))]
        steps = []
        for write in request.writes:
            if write.apply(state.order) != state.order:
                if write not in state.agreed:
                    steps.append(self.offer(write))
                steps.append(self.write(write))
        return steps

    def offer(self, write: Write) -> Command:
        """The command that asks for the customer's yes."""
        spec = self.level.commands["offer"]
        return Command("offer", (write.action, write.details)[: len(spec.args)])

    def write(self, write: Write) -> Command:
        """The command that carries the write out."""
        splits = len(self.level.commands[write.action].args) - 2
        details = write.details.split(" ", splits) if write.details else []
        return Command(write.action, (self.scenario.order.number, *details))

    def apply(self, state: State, command: Command) -> Outcome:
        """Carry out one command."""
        match command.name:
            case "say":
                return self._say(state, command.args[0])
            case "find":
                return self._find(state, command.args[0])
            case "verify":
                return self._verify(state, command.args[0])
            case "offer":
                return self._offer(state, Write(command.args[0], " ".join(command.args[1:])))
            case "tell":
                return self._tell(state, command.args[0])
            case "refuse":
                return self._refuse(state, command.args[0])
            case "close":
                return self._close(state)
        return self._write(state, command.args[0], Write(command.name, " ".join(command.args[1:])))

    def error(self, state: State, problem: str, hint: bool = True) -> Outcome:
        """An unchanged state and an error; at level 0 the error also says what comes next."""
        if hint and self.level.ids_first:
            return self._refused(state, problem, f"{problem}, {phrase(self.plan(state)[0])}")
        return self._refused(state, problem, problem)

    def _refused(self, state: State, problem: str, text: str) -> Outcome:
        return Outcome(state, [desk_says(f"error: {text}.")], problem)

    def _early(self, state: State) -> Outcome | None:
        """The error for dealing with a request before its customer and details are known."""
        step = self.plan(state)[0]
        return self._first(state, step) if step.name in _IDENTIFY else None

    def _first(self, state: State, step: Command) -> Outcome:
        return self.error(state, f"{phrase(step)} first", hint=False)

    def _say(self, state: State, text: str) -> Outcome:
        topic, order = topic_asked(text), self.scenario.order
        if topic == "order":
            answer = f"It is order {order.number}."
        elif topic == "zip":
            answer = f"My zip is {order.zip}."
        else:
            request = self.open_request(state)
            if request is None or not topic or self.level.hidden.get(request.intent) != topic:
                reply = customer_says("I am not sure what you mean.")
                return Outcome(state, [reply], "not a question that helps")
            answer = self._details(request)
        problem = "already answered" if topic in state.asked else None
        state = replace(state, asked=state.asked | {topic})
        return Outcome(state, [customer_says(answer)], problem)

    def _details(self, request: Request) -> str:
        if request.intent == "refund":
            return " and ".join(f"the {name}" for name in request.details).capitalize() + "."
        if request.intent == "exchange":
            return request.details[0].split(" ")[1].capitalize() + ", please."
        return f"It is {request.details[0].title()}."

    def _find(self, state: State, number: str) -> Outcome:
        order = state.order
        if state.found:
            return self.error(state, "already done")
        if number != order.number:
            return self.error(state, "wrong order number", hint=False)
        text = f"ok, order found: {order.status}"
        if not self.level.ids_first:
            if order.status == "delivered":
                text += f" {order.days} days ago"
            items = (f"{i.colour} {i.name}{' (final sale)' * i.final_sale}" for i in order.items)
            text += f"; {', '.join(items)}; {order.address.title()}"
        state = replace(state, found=True, asked=state.asked | {"order"})
        return Outcome(state, [desk_says(f"{text}.")])

    def _verify(self, state: State, zip_: str) -> Outcome:
        if state.verified:
            return self.error(state, "already done")
        if not state.found:
            return self._first(state, self.plan(state)[0])
        if zip_ != self.scenario.order.zip:
            return self.error(state, "wrong zip", hint=False)
        state = replace(state, verified=True, asked=state.asked | {"zip"})
        return Outcome(state, [desk_says("ok, zip verified.")])

    def _offer(self, state: State, write: Write) -> Outcome:
        if early := self._early(state):
            return early
        request = self.open_request(state)
        if request is not None and write not in request.writes:
            reply = customer_says(f"No, {self._want(request)}.")
            return Outcome(state, [reply], "not what the customer wants")
        if request is None or write in state.agreed:
            return self.error(state, "already done")
        # A customer agrees to what the rules forbid, too: they bind the agent.
        problem = "the rules forbid it" if self.refusal(request) else None
        state = replace(state, agreed=state.agreed | {write})
        return Outcome(state, [customer_says("Yes, please.")], problem)

    def _want(self, request: Request) -> str:
        details = f" ({', '.join(request.details)})" if any(request.details) else ""
        return WANTS[request.intent] + details

    def _write(self, state: State, number: str, write: Write) -> Outcome:
        if early := self._early(state):
            return early
        request = self.open_request(state)
        if request is None or (write in state.agreed and write.apply(state.order) == state.order):
            return self.error(state, "already done")
        if write not in state.agreed:
            step = self.plan(state)[0] if self.level.ids_first else self.offer(write)
            return self._first(state, step)
        if number != self.scenario.order.number:
            return self.error(state, "wrong order number", hint=False)
        forbidden = self.refusal(request) is not None
        order = write.apply(state.order)
        state = replace(state, order=order, spoiled=state.spoiled or forbidden)
        reply = [desk_says(f"ok, {DONE[write.action]}.")]
        if all(w.apply(order) == order for w in request.writes):
            state, more = self._settle(state)
            reply += more
        return Outcome(state, reply, "the rules forbid it" if forbidden else None)

    def _settle(self, state: State) -> tuple[State, list[Message]]:
        """End the open request; the customer makes the next one."""
        state = replace(state, current=state.current + 1, agreed=frozenset())
        request = self.open_request(state)
        return state, [customer_says(f"One more thing. {request.text}")] if request else []

    def _tell(self, state: State, status: str) -> Outcome:
        if early := self._early(state):
            return early
        request, reply = self.open_request(state), [customer_says("Thank you.")]
        asked = request is not None and request.intent == "question"
        problem = None if asked else "the customer did not ask for it"
        if status != self.scenario.order.status:
            state, problem = replace(state, spoiled=True), "wrong status"
        if asked:
            state, more = self._settle(state)
            reply += more
        return Outcome(state, reply, problem)

    def _refuse(self, state: State, reason: str) -> Outcome:
        if early := self._early(state):
            return early
        request = self.open_request(state)
        if request is None:
            return self.error(state, "already done")
        if request.intent == "question":
            reply = customer_says(f"No, {self._want(request)}.")
            return Outcome(state, [reply], "not what the customer wants")
        problem = None
        if reason != self.refusal(request):
            state, problem = replace(state, spoiled=True), "this reason does not apply"
        state, more = self._settle(state)
        return Outcome(state, [customer_says("I see."), *more], problem)

    def _close(self, state: State) -> Outcome:
        request = self.open_request(state)
        if request is None or state.spoiled:
            words = "Thanks, all solved. Bye." if self.solved(state) else "Thanks. Bye."
            return Outcome(replace(state, closed=True), [customer_says(words)])
        next_step = self.plan(state)[0]
        wait = phrase(next_step) if self.level.ids_first else WANTS[request.intent]
        return Outcome(state, [customer_says(f"Wait, {wait}.")], "too early")
