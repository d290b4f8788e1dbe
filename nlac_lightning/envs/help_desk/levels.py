"""The four levels: which intents, rules and commands each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nlac_lightning.envs.help_desk.commands import DIGITS, WORD, Argument, CommandSpec
from nlac_lightning.envs.help_desk.world import RETURN_DAYS


@dataclass(frozen=True)
class Level:
    """What one level asks of the agent.

    Attributes:
        number: 0 to 3.
        intents: what customers may want.
        plans: requests that may come together in one dialogue, in this order.
        commands: the command language by name.
        statuses: states of a shipment.
        system: the system message.
        max_turns: default limit; about twice what the longest task takes.
        max_items: most items that one refund is about.
        ids_first: the first message gives order number and zip, and errors say what comes next.
        hidden: by intent, the topic that the customer tells only when asked.
        policy: some requests are forbidden and must be refused.
        id_digits: digits of an order number and of a zip.
    """

    number: int
    intents: tuple[str, ...]
    plans: tuple[tuple[str, ...], ...]
    commands: Mapping[str, CommandSpec]
    statuses: tuple[str, ...]
    system: str
    max_turns: int
    max_items: int = 1
    ids_first: bool = False
    hidden: Mapping[str, str] = field(default_factory=dict)
    policy: bool = False
    id_digits: tuple[int, int] = (4, 5)


def _by_name(*specs: CommandSpec) -> dict[str, CommandSpec]:
    return {spec.name: spec for spec in specs}


_ORDER = Argument("order", DIGITS)
_ITEM = Argument("item", WORD)
_FIND = CommandSpec("find", (_ORDER,), "look up an order")
_VERIFY = CommandSpec("verify", (Argument("zip", DIGITS),), "check the zip of the found order")
_CANCEL = CommandSpec("cancel", (_ORDER,), "cancel the whole order")
_CLOSE = CommandSpec("close", (), "ask the customer whether all is done")


def _tell(statuses: tuple[str, ...]) -> CommandSpec:
    return CommandSpec(
        "tell",
        (Argument("status", choices=statuses),),
        f"tell the customer the order's status: {', '.join(statuses)}",
    )


_SHORT_STATUSES = ("packed", "shipped", "delayed", "lost")
_STATUSES = ("packed", "shipped", "delivered")

_SHORT_COMMANDS = _by_name(
    _FIND,
    _VERIFY,
    CommandSpec("offer", (Argument("action", choices=("refund", "cancel")),), "ask for a yes"),
    CommandSpec("refund", (_ORDER,), "refund the whole order"),
    _CANCEL,
    _tell(_SHORT_STATUSES),
    _CLOSE,
)

_COMMANDS = _by_name(
    CommandSpec("say", (Argument("text"),), "ask the customer one question, in your own words"),
    _FIND,
    _VERIFY,
    CommandSpec(
        "offer",
        (
            Argument("action", choices=("refund", "exchange", "cancel", "address")),
            Argument("details", required=False),
        ),
        "ask for the customer's yes to a change, with its details (all that follows the order "
        "number): offer refund pen, offer exchange pen white, offer cancel, offer address 4 Rue",
    ),
    CommandSpec("refund", (_ORDER, _ITEM), "refund one item"),
    CommandSpec("exchange", (_ORDER, _ITEM, Argument("colour", WORD)), "swap an item's colour"),
    _CANCEL,
    CommandSpec("address", (_ORDER, Argument("address")), "send the order to a new address"),
    _tell(_STATUSES),
    _CLOSE,
)

_REASONS = ("late", "final_sale", "shipped")
_REFUSE = CommandSpec(
    "refuse",
    (Argument("reason", choices=_REASONS),),
    f"refuse a request that the rules forbid; the reason is one of {', '.join(_REASONS)}",
)
_POLICY_COMMANDS = {**_COMMANDS, "refuse": _REFUSE}

_SHORT_SYSTEM = (
    "Help desk. First find ORDER (2 digits), then verify ZIP (3 digits).\n"
    "Money back: offer refund, refund ORDER, close.\n"
    "Stop the order: offer cancel, cancel ORDER, close.\n"
    "Where is it: tell STATUS (packed, shipped, delayed, lost), close."
)

_RULES = (
    "Find the customer's order and verify the zip before anything else.",
    "Ask for what you do not know, one question at a time.",
    "Offer every change with its details and wait for a yes before you make it.",
    "Make one change per item.",
    "Close when nothing is left to do.",
)
_POLICY_RULES = (
    f"Refund and exchange items only within {RETURN_DAYS} days of delivery (else: late).",
    "Final-sale items are never refunded or exchanged (final_sale).",
    "Cancel an order or change its address only before it is shipped (else: shipped).",
    "Ask for the details of a request before you refuse it.",
)


def _system(commands: Mapping[str, CommandSpec], rules: tuple[str, ...]) -> str:
    lines = ["You work at the help desk of a shop. Write one command per turn.", "Commands:"]
    lines += [f"- {spec.usage}: {spec.description}" for spec in commands.values()]
    return "\n".join([*lines, "Rules:", *(f"- {rule}" for rule in rules)])


_INTENTS = ("refund", "cancel", "exchange", "address", "question")
_SINGLE = tuple((intent,) for intent in _INTENTS)
_HIDDEN = {"refund": "item", "exchange": "colour", "address": "address"}

LEVELS = (
    Level(
        number=0,
        intents=("refund", "cancel", "question"),
        plans=(("refund",), ("cancel",), ("question",)),
        commands=_SHORT_COMMANDS,
        statuses=_SHORT_STATUSES,
        system=_SHORT_SYSTEM,
        max_turns=10,
        ids_first=True,
        id_digits=(2, 3),
    ),
    Level(
        number=1,
        intents=_INTENTS,
        plans=_SINGLE,
        commands=_COMMANDS,
        statuses=_STATUSES,
        system=_system(_COMMANDS, _RULES),
        max_turns=14,
    ),
    Level(
        number=2,
        intents=_INTENTS,
        plans=_SINGLE,
        commands=_POLICY_COMMANDS,
        statuses=_STATUSES,
        system=_system(_POLICY_COMMANDS, _RULES + _POLICY_RULES),
        max_turns=20,
        max_items=2,
        hidden=_HIDDEN,
        policy=True,
    ),
    Level(
        number=3,
        intents=_INTENTS,
        plans=(
            ("refund", "exchange"),
            ("exchange", "question"),
            ("question", "cancel"),
            ("address", "question"),
            ("refund", "question"),
        ),
        commands=_POLICY_COMMANDS,
        statuses=_STATUSES,
        system=_system(_POLICY_COMMANDS, _RULES + _POLICY_RULES),
        max_turns=24,
        hidden=_HIDDEN,
        policy=True,
    ),
)
