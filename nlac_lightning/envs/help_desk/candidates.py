"""Actions worth exploring in a state, right and wrong ones, in a fixed order."""

from __future__ import annotations

from nlac_lightning.envs.help_desk.commands import Command
from nlac_lightning.envs.help_desk.rules import Desk, State
from nlac_lightning.envs.help_desk.wording import QUESTIONS
from nlac_lightning.envs.help_desk.world import Write


def candidates(desk: Desk, state: State) -> list[str]:
    """Every command with what the customer has told so far, and a wrong order number or zip.

    Level 0 has 10: the wrong id is an order number until the order is found, then a zip.
    """
    level, order = desk.level, desk.scenario.order
    known = level.ids_first or "order" in state.asked
    commands = []
    if "say" in level.commands:
        topics = ("order", "zip", *dict.fromkeys(level.hidden.values()))
        commands += [Command("say", (QUESTIONS[topic],)) for topic in topics]
    if known:
        commands.append(Command("find", (order.number,)))
    if not state.found:
        commands.append(Command("find", (_other(order.number),)))
    if level.ids_first or "zip" in state.asked:
        commands.append(Command("verify", (order.zip,)))
    if state.found:
        commands.append(Command("verify", (_other(order.zip),)))
    if known:
        writes = _writes(desk, state)
        commands += [desk.offer(write) for write in writes]
        commands += [desk.write(write) for write in writes]
    wrong = next(status for status in level.statuses if status != order.status)
    commands += [Command("tell", (status,)) for status in (order.status, wrong)]
    if "refuse" in level.commands:
        commands += [Command("refuse", (r,)) for r in level.commands["refuse"].args[0].choices]
    return [str(command) for command in (*commands, Command("close"))]


def _writes(desk: Desk, state: State) -> list[Write]:
    """What the customer may have asked for: all at level 0, else the open request and a decoy."""
    if desk.level.ids_first:
        return [Write("refund"), Write("cancel")]
    request = desk.open_request(state)
    wanted = request.writes if request and not desk.hidden_topic(state, request) else ()
    return list(dict.fromkeys((*wanted, Write("cancel"))))


def _other(number: str) -> str:
    """Another number of as many digits."""
    low = 10 ** (len(number) - 1)
    return str((int(number) - low + 4 * low) % (9 * low) + low)
