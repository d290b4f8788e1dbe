"""The words of customers and desk, and how a message to a customer is understood."""

from __future__ import annotations

import re

from nlac_lightning.envs.help_desk.commands import Command

SHORT: dict[str, tuple[str, ...]] = {
    "refund": (
        "Please refund order {order}, zip {zip}.",
        "I want my money back for order {order}, zip {zip}.",
        "Order {order} was a mistake, please pay me back. My zip is {zip}.",
        "Zip {zip} here. Can you return my payment for order {order}?",
        "I am not happy with order {order} and want my cash back. Zip {zip}.",
        "You charged me for order {order}, I want that sum returned. Zip {zip}.",
        "Order {order}, zip {zip}: please reimburse me.",
        "I should not have paid for order {order}. Give me the money, my zip is {zip}.",
    ),
    "cancel": (
        "Please cancel order {order}, zip {zip}.",
        "I changed my mind, please do not send order {order}. Zip {zip}.",
        "Stop order {order}, I no longer need it. My zip is {zip}.",
        "Zip {zip} here. Can you call off order {order}?",
        "I ordered twice, so please drop order {order}. Zip {zip}.",
        "Order {order}, zip {zip}: I do not want it any more, stop it.",
        "Never mind order {order}, do not deliver it. My zip is {zip}.",
        "Can I still get out of order {order}? I do not need it. Zip {zip}.",
    ),
    "question": (
        "Where is order {order}? My zip is {zip}.",
        "Is there any news on order {order}? Zip {zip}.",
        "Zip {zip} here. Has order {order} left yet?",
        "How far along is order {order}? My zip is {zip}.",
        "I am waiting for order {order}, what is going on? Zip {zip}.",
        "Order {order}, zip {zip}: what is its status?",
        "Can you check on order {order} for me? My zip is {zip}.",
        "Did you send order {order} already? Zip {zip}.",
    ),
}
"""First messages that give the order number and the zip."""

FULL: dict[str, tuple[str, ...]] = {
    "refund": (
        "I am not happy with the {item} and want my money back.",
        "The {item} I got is broken, please pay me back.",
        "I would like to return the {item} and get a refund.",
        "The {item} is nothing like the picture. Can you give me back what I paid?",
    ),
    "exchange": (
        "Can I swap the {item} for one in {colour}?",
        "The {item} I got is the wrong colour, I would rather have it in {colour}.",
        "I would like to exchange the {item}, {colour} would suit me better.",
        "Please take back the {item} and send me a {colour} one instead.",
    ),
    "address": (
        "I am moving, please send my order to {address}.",
        "Please change the address of my order to {address}.",
        "I typed the wrong street, my order must go to {address}.",
        "Can you deliver my order to {address} instead?",
    ),
    "cancel": (
        "I changed my mind, please do not send my order.",
        "I no longer need what I ordered, please call it off.",
        "Please cancel my order.",
        "I ordered twice by mistake, please stop one of the two orders.",
    ),
    "question": (
        "How far along is my order?",
        "Is there any news on my order?",
        "I am waiting for my order, what is going on with it?",
        "Can you check on my order for me?",
    ),
}
"""Requests with all details, but without order number and zip."""

VAGUE: dict[str, tuple[str, ...]] = {
    **FULL,
    "refund": (
        "I am not happy with something I bought and want my money back.",
        "Not everything I got is in order, please pay me back.",
        "I would like to return part of my order and get a refund.",
        "What I got is nothing like the picture. Can you give me back what I paid?",
    ),
    "exchange": (
        "Can I swap the {item} for one in another colour?",
        "The {item} I got is the wrong colour, I would rather have a different one.",
        "I would like to exchange the {item} for another colour.",
        "Please take back the {item} and send me one that goes with my room.",
    ),
    "address": (
        "I am moving, please send my order to my new home.",
        "Please change the address of my order.",
        "I typed the wrong street, can you correct my order?",
        "Can you deliver my order somewhere else?",
    ),
}
"""Requests whose details the customer gives only when asked."""

WANTS = {
    "refund": "I want a refund",
    "cancel": "I want to cancel",
    "exchange": "I want an exchange",
    "address": "I want a new address",
    "question": "I only have a question",
}

QUESTIONS = {
    "order": "What is your order number?",
    "zip": "What is your zip code?",
    "item": "Which item do you mean?",
    "colour": "Which colour would you like?",
    "address": "What is the new address?",
}
"""How the oracle asks for each topic."""

DONE = {
    "refund": "refunded",
    "cancel": "cancelled",
    "exchange": "exchanged",
    "address": "address changed",
}
"""What the desk reports after a write."""

_PHRASES = {
    "find": "find the order",
    "verify": "verify the zip",
    "offer refund": "offer the refund",
    "offer cancel": "offer to cancel",
    "offer exchange": "offer the exchange",
    "offer address": "offer the new address",
    "refund": "refund the order",
    "cancel": "cancel the order",
    "exchange": "exchange the item",
    "address": "change the address",
    "tell": "tell the status",
    "refuse": "refuse the request",
    "close": "close",
    f"say {QUESTIONS['order']}": "ask for the order number",
    f"say {QUESTIONS['zip']}": "ask for the zip",
    f"say {QUESTIONS['item']}": "ask which item",
    f"say {QUESTIONS['colour']}": "ask which colour",
    f"say {QUESTIONS['address']}": "ask for the new address",
}

_TOPICS = re.compile(
    r"(?P<order>order (?:number|id|no\b)|number of (?:the|your) order)"
    r"|(?P<zip>\bzip\b|\bpost(?:al |)code\b)"
    r"|(?P<item>\bitems?\b|\bproducts?\b|\bwhich (?:one|part))"
    r"|(?P<colour>\bcolou?r\b)"
    r"|(?P<address>\baddress\b|\bstreet\b|\bwhere to\b)"
)


def topic_asked(text: str) -> str | None:
    """The first topic of :data:`QUESTIONS` that a message asks about, or None.

    A customer answers one question at a time, so later topics are not heard.
    """
    match = _TOPICS.search(text.lower())
    return match.lastgroup if match else None


def phrase(command: Command) -> str:
    """A command in a few words, without ids."""
    return (
        _PHRASES.get(f"{command.name} {command.args[0]}" if command.args else "")
        or (_PHRASES[command.name])
    )
