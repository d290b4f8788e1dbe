"""Procedural generation of scenarios; equal seeds give equal scenarios."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from nlac_lightning.envs.help_desk.levels import Level
from nlac_lightning.envs.help_desk.wording import FULL, SHORT, VAGUE
from nlac_lightning.envs.help_desk.world import RETURN_DAYS, Item, Order, Request, Scenario

SPLITS = ("train", "val", "test")

MAX_TASKS = 20_000
"""Most tasks of one split; level 0 has 27,000 pairs of order number and zip for each."""

_ITEMS = ("lamp", "mug", "chair", "rug", "clock", "vase", "bag", "coat", "shelf", "kettle")
_COLOURS = ("red", "blue", "green", "black", "white", "grey", "yellow", "brown")
_STREETS = ("oak street", "mill lane", "hill road", "park avenue", "lake drive", "elm court")


def scenarios(
    level: Level, plans: Sequence[tuple[str, ...]], split: str, count: int, seed: int
) -> list[Scenario]:
    """``count`` scenarios of one split, with the plans in turn; a shorter list is a prefix.

    Each split has zips of its own (by remainder of three), so that no two share a customer
    whatever their sizes and seeds.
    """
    rng = Random(f"help_desk/{level.number}/{split}/{seed}")
    ids = _ids(level, SPLITS.index(split), rng)
    return [
        _scenario(level, plans[i % len(plans)], number, zip_, rng)
        for i, (number, zip_) in enumerate(islice(ids, count))
    ]


def _ids(level: Level, remainder: int, rng: Random) -> Iterator[tuple[str, str]]:
    """Distinct pairs of order number and zip."""
    numbers, zips = (range(10 ** (digits - 1), 10**digits) for digits in level.id_digits)
    own = range(zips.start + (remainder - zips.start) % len(SPLITS), zips.stop, len(SPLITS))
    seen = set()
    while True:
        pair = (str(rng.choice(numbers)), str(rng.choice(own)))
        if pair not in seen:
            seen.add(pair)
            yield pair


def _scenario(level: Level, plan: tuple[str, ...], number: str, zip_: str, rng: Random) -> Scenario:
    if level.ids_first:
        return _short_scenario(level, plan[0], number, zip_, rng)
    names = rng.sample(_ITEMS, 3 if level.policy else 1)
    colours = {name: rng.choice(_COLOURS) for name in names}
    address, new_address = (f"{rng.randint(2, 98)} {street}" for street in rng.sample(_STREETS, 2))
    # Two fifths of the requests are forbidden where there is a policy.
    forbidden = rng.choice((None, None, None, "late", "final_sale")) if level.policy else None
    status, days = _shipment(level, plan, forbidden, rng)
    requests: list[Request] = []
    for intent in plan:
        details: tuple[str, ...] = ()
        target = names[len(requests)] if level.policy else names[0]
        colour = rng.choice([c for c in _COLOURS if c != colours[target]])
        if intent == "refund":
            # A final-sale item comes alone, so that a request is allowed or not as a whole.
            most = 1 if forbidden == "final_sale" else level.max_items
            details = tuple(names[: rng.randint(1, most)])
        elif intent == "exchange":
            details = (f"{target} {colour}",)
        elif intent == "address":
            details = (new_address,)
        elif intent == "cancel":
            details = ("",)
        wording = rng.choice((VAGUE if level.hidden else FULL)[intent])
        text = wording.format(item=target, colour=colour, address=new_address.title())
        requests.append(Request(intent, details, text))
    wanted = [name for name in names if any(name in r.item_names for r in requests)]
    final = {n for n in names if level.policy and n not in wanted and rng.random() < 0.3}
    if forbidden == "final_sale" and wanted:
        final.add(rng.choice(wanted))
    items = (Item(name, colours[name], name in final) for name in rng.sample(names, len(names)))
    return Scenario(Order(number, zip_, status, tuple(items), address, days), tuple(requests))


def _short_scenario(level: Level, intent: str, number: str, zip_: str, rng: Random) -> Scenario:
    """Level 0: an order is one thing, refunded or cancelled as a whole, in whatever status."""
    order = Order(number, zip_, rng.choice(level.statuses), (Item("order"),))
    text = rng.choice(SHORT[intent]).format(order=number, zip=zip_)
    return Scenario(order, (Request(intent, () if intent == "question" else ("",), text),))


def _shipment(
    level: Level, plan: tuple[str, ...], forbidden: str | None, rng: Random
) -> tuple[str, int]:
    """Status and days since delivery, so that cancel and address are allowed or forbidden."""
    if {"cancel", "address"} & set(plan):
        return ("shipped" if forbidden else "packed"), 0
    returned = bool({"refund", "exchange"} & set(plan))
    status = "delivered" if returned else rng.choice(level.statuses)
    days = rng.randint(1, RETURN_DAYS) if status == "delivered" else 0
    return status, days + RETURN_DAYS * (returned and forbidden == "late")
