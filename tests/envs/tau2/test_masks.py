"""Reasons to leave tasks out, against the environment itself where it can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nlac_lightning.envs.tau2 import Tau2Env
from nlac_lightning.envs.tau2.actions import Call
from nlac_lightning.envs.tau2.recorded import RecordedUser
from nlac_lightning.envs.tau2.tasks import KNOWN_BAD_GOLD, MASKS, ORDER_SENSITIVE


def turned_round(call: Call) -> Call:
    """The same changes in the other order: what to change and what into, pair by pair."""
    pairs = {k: v[::-1] for k, v in call.arguments.items() if k in ("item_ids", "new_item_ids")}
    return replace(call, arguments=call.arguments | pairs)


def test_order_sensitive_tasks_are_those_whose_end_the_order_of_items_changes(env: Any) -> None:
    found = set()
    for task in env.domain.tasks.values():
        other = replace(task, gold=tuple(turned_round(call) for call in task.gold))
        if other.gold == task.gold:
            continue
        before, after = env.domain.gold(task), env.domain.gold(other)
        if before.fingerprint != after.fingerprint:
            found.add(task.id)
    assert found == ORDER_SENSITIVE.get(env.domain.name, set())


@pytest.mark.parametrize(("domain", "total"), [("retail", 114), ("airline", 50)])
def test_each_reason_leaves_out_its_tasks_and_no_other(domain: str, total: int) -> None:
    lists = {"known_bad_gold": KNOWN_BAD_GOLD[domain], "order_sensitive": ORDER_SENSITIVE}
    lists["order_sensitive"] = ORDER_SENSITIVE.get(domain, set())
    whole = Tau2Env(domain, RecordedUser(["x"]))
    tasks = {t.id: whole.facts(t)["masks"] for s in ("train", "test") for t in whole.tasks(s)}
    assert len(tasks) == total, "nothing is left out by default"
    for reason in MASKS:
        env = Tau2Env(domain, RecordedUser(["x"]), exclude=[reason])
        kept = {task.id for split in ("train", "test") for task in env.tasks(split)}
        assert set(tasks) - kept == {i for i, masks in tasks.items() if reason in masks}
        if reason in lists:
            assert set(tasks) - kept == lists[reason]


@pytest.mark.parametrize("error", [RuntimeError("no database"), KeyError("x"), RecursionError()])
def test_a_tool_that_raises_is_an_observation(retail: Any, error: Exception) -> None:
    session = retail.reset(retail.tasks("train")[0])

    def raises(**arguments: Any) -> None:
        raise error

    session.environment.tools.get_order_details = raises
    step = session.step('get_order_details(order_id="#W6247578")')
    assert step.info["valid"] and step.info["tool_error"] and not step.truncated
    assert step.messages[0]["content"].startswith("Error:")
    assert not session.step("list_all_product_types()").info["tool_error"]
