"""The shop's data: orders, the writes that change them, and what customers want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

RETURN_DAYS = 30
"""Days after delivery within which an item can be refunded or exchanged."""


@dataclass(frozen=True)
class Item:
    """One thing in an order; ``state`` is "" until it is "refunded" or "exchanged"."""

    name: str
    colour: str = ""
    final_sale: bool = False
    state: str = ""


@dataclass(frozen=True)
class Order:
    """One row of the database; ``days`` counts from delivery and is 0 before it."""

    number: str
    zip: str
    status: str
    items: tuple[Item, ...]
    address: str = ""
    days: int = 0
    cancelled: bool = False


@dataclass(frozen=True)
class Write:
    """One change of an order: the action, and its details in words ("lamp blue")."""

    action: str
    details: str = ""

    def apply(self, order: Order) -> Order:
        """The order after this write; an order that already has it comes back equal.

        Without details a refund is of the whole order.
        """
        if self.action == "cancel":
            return replace(order, cancelled=True)
        if self.action == "address":
            return replace(order, address=self.details)
        name, _, colour = self.details.partition(" ")
        return replace(order, items=tuple(self._change(item, name, colour) for item in order.items))

    def _change(self, item: Item, name: str, colour: str) -> Item:
        if name not in ("", item.name):
            return item
        if self.action == "exchange":
            return replace(item, colour=colour, state="exchanged")
        return replace(item, state="refunded")


@dataclass(frozen=True)
class Request:
    """What a customer wants.

    Attributes:
        intent: ``refund``, ``cancel``, ``exchange``, ``address``, or ``question`` (no write).
        details: the details of each write that it takes.
        text: how the customer says it.
    """

    intent: str
    details: tuple[str, ...]
    text: str

    @property
    def writes(self) -> tuple[Write, ...]:
        """The writes that the customer asks for, allowed or not."""
        return tuple(Write(self.intent, details) for details in self.details)

    @property
    def item_names(self) -> set[str]:
        """Names of the items that a refund or an exchange is about."""
        if self.intent not in ("refund", "exchange"):
            return set()
        return {details.split(" ")[0] for details in self.details}

    def refusal(self, order: Order) -> str | None:
        """The reason for which the shop's policy forbids this request, or None."""
        if self.intent in ("cancel", "address"):
            return None if order.status == "packed" else "shipped"
        if self.intent in ("refund", "exchange"):
            if order.days > RETURN_DAYS:
                return "late"
            if any(item.final_sale for item in order.items if item.name in self.item_names):
                return "final_sale"
        return None


@dataclass(frozen=True)
class Scenario:
    """One task's content: the customer's order and requests, the first of which opens."""

    order: Order
    requests: tuple[Request, ...]

    def to_data(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Scenario:
        """Inverse of :meth:`to_data`, also after a round trip through JSON."""
        order = dict(data["order"])
        order["items"] = tuple(Item(**item) for item in order["items"])
        requests = (dict(r, details=tuple(r["details"])) for r in data["requests"])
        return cls(Order(**order), tuple(Request(**r) for r in requests))
