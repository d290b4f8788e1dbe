"""The help desk: determinism, disjoint splits, an exact oracle, rules that hold."""

import copy
import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlac_lightning.envs.base import OracleCritique, Session, Step, Task
from nlac_lightning.envs.help_desk import HelpDeskEnv
from nlac_lightning.envs.help_desk.session import HelpDeskSession
from nlac_lightning.errors import ConfigError

LEVELS = (0, 1, 2, 3)
SPLITS = ("train", "val", "test")


def small(level: int, n: int = 30, **settings) -> HelpDeskEnv:
    return HelpDeskEnv(level, n_train=n, n_val=n, n_test=n, **settings)


def task_of(env: HelpDeskEnv, intent: str, **facts) -> Task:
    """The first training task that opens with this intent and whose order has these facts."""
    for task in env.tasks("train"):
        order = task.data["order"]
        if task.data["requests"][0]["intent"] == intent and facts.items() <= order.items():
            return task
    raise AssertionError(f"no {intent} task with {facts}")


def play(session: Session, *actions: str) -> list[Step]:
    return [session.step(action) for action in actions]


def replies(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


def play_oracle(session: HelpDeskSession) -> list[Step]:
    steps = []
    while (action := session.oracle_action()) is not None:
        steps.append(session.step(action))
    return steps


# --- tasks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_tasks_are_equal_for_equal_seeds_and_differ_for_others(level):
    first, again, other = small(level), small(level), small(level, seed=1)
    for split in SPLITS:
        assert first.tasks(split) == again.tasks(split)
        assert first.tasks(split) != other.tasks(split)
        # A smaller split is a prefix of a larger one: figures on few tasks can be extended.
        assert small(level, n=7).tasks(split) == first.tasks(split)[:7]


@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_task_whatever_their_seeds(level):
    contents, ids = {}, []
    for seed in (0, 5):
        env = HelpDeskEnv(level, n_train=2000, n_val=400, n_test=400, seed=seed)
        for split in SPLITS:
            tasks = env.tasks(split)
            if seed == 0:
                ids += [task.id for task in tasks]
            content = [
                (t.data["order"]["number"], t.data["order"]["zip"], r["intent"], r["text"])
                for t in tasks
                for r in t.data["requests"]
            ]
            assert len(set(content)) == len(content)
            contents.setdefault(split, set()).update(content)
    assert not contents["train"] & contents["val"]
    assert not contents["train"] & contents["test"]
    assert not contents["val"] & contents["test"]
    assert len(set(ids)) == len(ids) == 2800
    assert all(re.fullmatch(r"(train|val|test)-\d{4}", task_id) for task_id in ids)


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_survives_json(level):
    env = small(level)
    for task in env.tasks("val"):
        stored = Task(task.id, task.split, json.loads(json.dumps(task.data)))
        session = env.reset(stored)
        assert session.opening == env.reset(task).opening
        assert play_oracle(session)[-1].reward == 1.0


@pytest.mark.parametrize("intent", ["refund", "cancel", "question"])
def test_level_0_words_each_intent_in_many_ways_and_never_by_one_keyword(intent):
    env = HelpDeskEnv(intents=[intent])
    texts = [env.reset(task).opening[1]["content"] for task in env.tasks("train")]
    patterns = {re.sub(r"\d+", "N", text) for text in texts}
    assert len(patterns) >= 6
    for task, text in zip(env.tasks("train"), texts, strict=True):
        assert re.findall(r"\b\d\d\b", text) == [task.data["order"]["number"]]
        assert re.findall(r"\b\d\d\d\b", text) == [task.data["order"]["zip"]]
    keyword = {"refund": "refund", "cancel": "cancel", "question": "where"}[intent]
    assert sum(keyword in pattern.lower() for pattern in patterns) < len(patterns) / 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"level": 4}, "env.level"),
        ({"level": -1}, "env.level"),
        ({"n_train": 0}, "env.n_train"),
        ({"n_val": -3}, "env.n_val"),
        ({"n_test": 10**6}, "env.n_test"),
        ({"max_turns": 0}, "env.max_turns"),
        ({"intents": ["exchange"]}, "env.intents"),
        ({"intents": []}, "env.intents"),
        ({"level": 3, "intents": ["refund", "cancel"]}, "env.intents"),
    ],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError) as caught:
        HelpDeskEnv(**settings)
    assert caught.value.field == field


def test_an_unknown_split_is_a_config_error():
    with pytest.raises(ConfigError, match="train, val, test"):
        small(0).tasks("dev")


def test_intents_restrict_the_tasks():
    env = small(3, intents=["question", "cancel"])
    for task in env.tasks("train"):
        assert [r["intent"] for r in task.data["requests"]] == ["question", "cancel"]


@pytest.mark.parametrize("level", LEVELS)
def test_tools_are_function_schemas_of_the_commands_in_the_system_message(level):
    env = small(level)
    system = env.reset(env.tasks("train")[0]).opening[0]["content"]
    for tool in env.tools:
        function = tool["function"]
        assert tool["type"] == "function" and function["description"]
        assert function["name"] in system
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    assert ("refuse" in system) == (level >= 2)
    json.dumps(env.tools)


# --- the oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "shortest", "longest"), [(0, 4, 5), (1, 6, 7), (2, 6, 10), (3, 7, 11)]
)
def test_the_oracle_solves_every_task_in_the_stated_number_of_turns(level, shortest, longest):
    env, lengths = HelpDeskEnv(level), set()
    for split in SPLITS:
        for task in env.tasks(split):
            session = env.reset(task)
            while (action := session.oracle_action()) is not None:
                assert action in session.admissible()
                assert session.oracle_critique(action).good
                step = session.step(action)
                assert step.info["valid"] and step.info["right"] and step.info["error"] is None
                assert step.reward == float(step.terminated)
            assert step.terminated and step.info["reason"] == "solved"
            lengths.add(session.turn)
    assert (min(lengths), max(lengths)) == (shortest, longest)
    assert longest <= env.max_turns // 2 + 1


def shortest(session: HelpDeskSession, memo: dict) -> float:
    """Fewest admissible actions to reward 1, by exhaustive search that knows only rewards."""
    key = (session.state, session.turn)
    if key not in memo:
        best = float("inf")
        for action in session.admissible():
            child = copy.copy(session)
            step = child.step(action)
            rest = 0.0 if step.terminated else shortest(child, memo)
            if not step.terminated or step.reward == 1.0:
                best = min(best, 1 + rest)
        memo[key] = best
    return memo[key]


def check_critiques(session: HelpDeskSession, memo: dict, checked: dict) -> None:
    """Compare every critique in every reachable state with the search."""
    key = (session.state, session.turn)
    if key in checked:
        return
    before = shortest(session, memo)
    checked[key] = before
    step_action = session.oracle_action()
    for action in (*session.admissible(), "nonsense"):
        critique = session.oracle_critique(action)
        child = copy.copy(session)
        step = child.step(action)
        after = 0.0 if step.reward == 1.0 else float("inf")
        if not step.terminated:
            after = shortest(child, memo)
        assert critique.good == (after < before), (action, session.state)
        assert step.info["right"] == critique.good
        assert critique.action == step_action
        if not critique.good and before < float("inf"):
            assert step.info["error"], (action, session.state)
        if not step.terminated:
            check_critiques(child, memo, checked)
    if before == float("inf"):
        assert step_action == "close"
    else:
        assert session.oracle_critique(step_action).good


@pytest.mark.parametrize("intent", ["refund", "cancel", "question"])
def test_level_0_critiques_equal_exhaustive_search(intent):
    # Two turns of slack, so that states from which time runs out are among those checked.
    env = small(0, intents=[intent], max_turns=7)
    for task in env.tasks("train")[:3]:
        checked: dict = {}
        check_critiques(env.reset(task), {}, checked)
        assert len(checked) > 20
        assert {float("inf"), 1.0, 4.0} <= set(checked.values())


@pytest.mark.parametrize("level", [1, 2, 3])
def test_higher_level_critiques_equal_exhaustive_search(level):
    chosen: dict[bool, list[tuple[Task, int]]] = {False: [], True: []}
    for task in small(level).tasks("val"):
        session, actions = small(level).reset(task), []
        while (action := session.oracle_action()) is not None:
            actions.append(action)
            session.step(action)
        chosen[any(a.startswith("refuse") for a in actions)].append((task, len(actions)))
    assert bool(chosen[True]) == (level > 1)
    for task, turns in chosen[False][:3] + chosen[True][:2]:
        env = small(level, max_turns=turns + 1)
        check_critiques(env.reset(task), {}, {})


def test_critiques_are_short_and_end_in_the_next_command():
    env = small(0)
    task = task_of(env, "refund")
    number, zip_ = task.data["order"]["number"], task.data["order"]["zip"]
    session = env.reset(task)
    assert session.oracle_critique(f"refund {number}").text() == (
        f"bad: find the order first. Do: find {number}"
    )
    assert session.oracle_critique("hello").text() == f"bad: unknown command. Do: find {number}"
    assert session.oracle_critique(f"find {number}").text() == "good: it is time to find the order."
    play(session, f"find {number}")
    assert session.oracle_critique("verify 1").text() == f"bad: wrong zip. Do: verify {zip_}"
    play(session, f"verify {zip_}")
    assert session.oracle_critique("offer cancel").text() == (
        "bad: not what the customer wants. Do: offer refund"
    )
    # Asking leaves the dialogue as it was.
    assert session.turn == 2 and session.oracle_action() == "offer refund"


def test_nothing_is_good_once_the_task_cannot_be_solved():
    env = small(0)
    task = task_of(env, "question", status="packed")
    order = task.data["order"]
    session = env.reset(task)
    *_, told = play(session, f"find {order['number']}", f"verify {order['zip']}", "tell lost")
    assert replies(told) == ["Thank you."] and not told.info["right"] and not told.terminated
    assert session.oracle_action() == "close"
    for action in session.admissible():
        critique = session.oracle_critique(action)
        assert critique == OracleCritique(False, "it can no longer be solved.", "close")
    (end,) = play(session, "close")
    assert (end.terminated, end.reward, end.info["reason"]) == (True, 0.0, "wrong_outcome")
    assert replies(end) == ["Thanks. Bye."]


# --- dialogues -----------------------------------------------------------------------------


def test_a_level_0_refund_in_full():
    env = small(0)
    task = task_of(env, "refund", status="shipped")
    number, zip_ = task.data["order"]["number"], task.data["order"]["zip"]
    script = [
        ("close", "Customer", "Wait, find the order."),
        (f"refund {number}", "Desk", "error: find the order first."),
        ("find 9", "Desk", "error: wrong order number."),
        (f"Find(order={number})", "Desk", "ok, order found: shipped."),
        ("offer refund", "Desk", "error: verify the zip first."),
        ("please help", "Desk", "error: unknown command, verify the zip."),
        (f"find {number}", "Desk", "error: already done, verify the zip."),
        ("verify 1", "Desk", "error: wrong zip."),
        (f"`verify {zip_}`.", "Desk", "ok, zip verified."),
        (f"refund {number}", "Desk", "error: offer the refund first."),
        ("offer cancel", "Customer", "No, I want a refund."),
        ("tell shipped", "Customer", "Thank you."),
        ("OFFER REFUND", "Customer", "Yes, please."),
        ("offer refund", "Desk", "error: already done, refund the order."),
        ("close", "Customer", "Wait, refund the order."),
        ("refund 9", "Desk", "error: wrong order number."),
        (f'"refund {number}"', "Desk", "ok, refunded."),
        (f"refund {number}", "Desk", "error: already done, close."),
        ("offer cancel", "Desk", "error: already done, close."),
        ("close", "Customer", "Thanks, all solved. Bye."),
    ]
    session = small(0, max_turns=len(script)).reset(task)
    for action, speaker, reply in script:
        step = session.step(action)
        role = {"Desk": "tool", "Customer": "user"}[speaker]
        assert step.messages == [{"role": role, "name": speaker, "content": reply}], action
    assert (step.reward, step.terminated, step.info["reason"]) == (1.0, True, "solved")


def test_a_customer_leaves_after_max_turns():
    env = small(0)
    session = env.reset(env.tasks("train")[0])
    steps = play(session, *["close"] * 10)
    assert not any(step.terminated for step in steps[:-1])
    assert steps[-1].terminated and steps[-1].reward == 0.0
    assert steps[-1].info["reason"] == "customer_left"
    assert replies(steps[-1])[-1] == "This takes too long. Bye."
    assert session.oracle_action() is None and session.oracle_critique("close") is None
    assert list(session.admissible()) == []
    late = session.step("close")
    assert late.terminated and late.reward == 0.0 and late.messages == []


def identify(task: Task) -> list[str]:
    order = task.data["order"]
    return [
        "say May I have your order number?",
        f"find {order['number']}",
        "say And the zip code, please?",
        f"verify {order['zip']}",
    ]


def test_ids_come_one_at_a_time_and_only_when_asked():
    env = small(1)
    for task in env.tasks("train"):
        order = task.data["order"]
        opening = env.reset(task).opening[1]["content"]
        assert order["number"] not in opening and order["zip"] not in opening
    session = env.reset(task)
    asked, again, vague = play(
        session, "say Your order number and zip code?", "say order number?", "say hello"
    )
    assert replies(asked) == [f"It is order {order['number']}."] and asked.info["right"]
    assert replies(again) == replies(asked) and not again.info["right"]
    assert replies(vague) == ["I am not sure what you mean."] and vague.info["valid"]


def test_a_write_needs_a_yes_to_the_very_details():
    env = small(1)
    task = task_of(env, "exchange")
    item, colour = task.data["requests"][0]["details"][0].split()
    number = task.data["order"]["number"]
    wrong = "red" if colour != "red" else "blue"
    session = env.reset(task)
    *_, no, early, yes, other, done, again, end = play(
        session,
        *identify(task),
        f"offer exchange {item} {wrong}",
        f"exchange {number} {item} {wrong}",
        f"offer(exchange, {item} {colour})",
        f"exchange {number} {item} {wrong}",
        f"exchange(order={number}, item={item}, colour={colour})",
        f"exchange {number} {item} {colour}",
        "close",
    )
    assert replies(no) == [f"No, I want an exchange ({item} {colour})."]
    assert replies(early) == replies(other) == ["error: offer the exchange first."]
    assert replies(yes) == ["Yes, please."] and replies(done) == ["ok, exchanged."]
    assert replies(again) == ["error: already done."]
    assert end.reward == 1.0


@pytest.mark.parametrize(
    ("reason", "intent"), [("shipped", "cancel"), ("shipped", "address"), ("late", "refund")]
)
def test_doing_what_the_policy_forbids_is_possible_and_fatal(reason, intent):
    env = small(2, n=400)
    for task in env.tasks("train"):
        request, order = task.data["requests"][0], task.data["order"]
        forbidden = order["status"] == "shipped" if reason == "shipped" else order["days"] > 30
        if request["intent"] == intent and forbidden:
            break
    ask = {"cancel": [], "address": ["say Which address?"], "refund": ["say Which items?"]}[intent]
    writes = [
        action
        for details in request["details"]
        for action in (f"offer {intent} {details}", f"{intent} {order['number']} {details}")
    ]
    done = play(env.reset(task), *identify(task), *ask, *writes, "close")
    assert replies(done[len(identify(task)) + len(ask)]) == ["Yes, please."]
    assert (done[-1].reward, done[-1].info["reason"]) == (0.0, "wrong_outcome")
    refused = play(env.reset(task), *identify(task), *ask, f"refuse {reason}", "close")
    assert (refused[-1].reward, refused[-1].info["reason"]) == (1.0, "solved")
    wrong = {"shipped": "late", "late": "final_sale"}[reason]
    lied = play(env.reset(task), *identify(task), *ask, f"refuse {wrong}", "close")
    assert (lied[-1].reward, lied[-1].info["reason"]) == (0.0, "wrong_outcome")


def test_final_sale_items_are_refused_and_shown():
    env = small(2, n=400, intents=["refund"])
    seen = 0
    for task in env.tasks("train"):
        order, (name, *more) = task.data["order"], task.data["requests"][0]["details"]
        item = next(item for item in order["items"] if item["name"] == name)
        if order["days"] > 30 or not item["final_sale"] or more:
            continue
        seen += 1
        steps = play(env.reset(task), *identify(task), "say Which item?", "refuse final_sale")
        assert f"{name} (final sale)" in replies(steps[1])[0]
        assert replies(steps[-2]) == [f"The {name}."] and steps[-1].info["right"]
    assert seen >= 20


def test_refusing_an_allowed_request_is_fatal():
    env = small(2)
    task = task_of(env, "cancel", status="packed")
    *_, refused, end = play(env.reset(task), *identify(task), "refuse shipped", "close")
    assert not refused.info["right"] and end.info["reason"] == "wrong_outcome"


def test_the_second_request_comes_when_the_first_is_dealt_with():
    env = small(3, intents=["question", "cancel"])
    task = env.tasks("train")[0]
    status, number = task.data["order"]["status"], task.data["order"]["number"]
    first, second = task.data["requests"]
    session = env.reset(task)
    assert session.opening[1]["content"] == first["text"]
    *_, early, told = play(session, *identify(task), "offer cancel", f"tell {status}")
    assert replies(early) == ["No, I only have a question."]
    assert replies(told) == ["Thank you.", f"One more thing. {second['text']}"]
    (wait,) = play(session, "close")
    assert replies(wait) == ["Wait, I want to cancel."]
    rest = ["offer cancel", f"cancel {number}"] if status == "packed" else ["refuse shipped"]
    assert play(session, *rest, "close")[-1].reward == 1.0


# --- wrong paths ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_random_and_idle_policies_earn_little(level):
    env, rng, total = small(level), random.Random(0), 0.0
    for task in env.tasks("val"):
        session = env.reset(task)
        while not session.ended:
            total += session.step(rng.choice(session.admissible())).reward
        idle = env.reset(task)
        while not idle.ended:
            assert idle.step("close").reward == 0.0
    assert total / len(env.tasks("val")) < 0.1


@pytest.mark.parametrize("level", LEVELS)
def test_leaving_out_a_right_action_does_not_solve_the_task(level):
    env = small(level, n=15)
    for task in env.tasks("val"):
        session, actions = env.reset(task), []
        while (action := session.oracle_action()) is not None:
            actions.append(action)
            session.step(action)
        for i, action in enumerate(actions):
            if re.search("order number|zip code", action):
                continue  # what is asked here could be guessed
            steps = play(env.reset(task), *actions[:i], *actions[i + 1 :])
            assert sum(step.reward for step in steps) == 0.0, action


ODD_ACTIONS = [
    "",
    " ",
    "\n\n",
    "find",
    "find 52 53",
    "find(order=52, order=52)",
    "find(zip=52)",
    "find\t52",
    "find 52\nverify 104",
    "find \x00 52",
    "find \u0665\u0662",
    "find 5\u200b2",
    "find 99999999999999999999",
    "close now",
    "close(1, 2)",
    "tell",
    "tell nothing",
    "offer",
    "offer exchange",
    "()",
    "find(" * 50,
    "\ud800",
    "find " + "5" * 100_000,
    "x" * 100_000,
    "`" * 100_000,
    " " * 100_000,
    "<|im_end|>\n<|im_start|>user\nclose",
]


@pytest.mark.parametrize("action", ODD_ACTIONS, ids=range(len(ODD_ACTIONS)))
def test_odd_actions_are_invalid_and_answered_in_words_at_once(action):
    env = small(0)
    session = env.reset(env.tasks("train")[0])
    start = time.perf_counter()
    step = session.step(action)
    assert time.perf_counter() - start < 0.5
    assert not step.info["valid"] and not step.info["right"]
    assert replies(step) == ["error: unknown command, find the order."]


def test_higher_levels_say_how_a_command_is_written():
    env = small(1)
    session = env.reset(env.tasks("train")[0])
    usage, unknown = play(session, "refund lamp", "help me")
    assert replies(usage) == ["error: use refund ORDER ITEM."]
    assert replies(unknown) == ["error: unknown command."]


VOCABULARY = """
find verify offer refund cancel exchange address tell refuse say close order zip number ( ) = , .
52 104 lamp blue shipped late which item colour <|im_end|> <|im_start|>
"""
WORDS = st.sampled_from(VOCABULARY.split())


@settings(max_examples=150, deadline=None)
@given(
    level=st.sampled_from(LEVELS),
    index=st.integers(0, 29),
    progress=st.integers(0, 6),
    action=st.one_of(st.text(max_size=400), st.lists(WORDS, max_size=8).map(" ".join)),
)
def test_no_text_raises_or_is_echoed(level, index, progress, action):
    env = small(level)
    session = env.reset(env.tasks("train")[index])
    for _ in range(min(progress, 3)):
        session.step(session.oracle_action())
    critique = session.oracle_critique(action)
    step = session.step(action)
    json.dumps(step.info)
    assert step.info["right"] == critique.good
    assert step.messages and {"valid", "right", "error"} <= set(step.info)
    for message in step.messages:
        assert re.fullmatch(r"[A-Za-z0-9 ,.;:?'()_\[\]]{1,200}", message["content"])


# --- size of level 0 -----------------------------------------------------------------------


def pieces(text: str) -> int:
    """Words, digits, marks and line ends: a small tokenizer's pieces, to within a few."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]|\n", text))


def test_level_0_prompts_are_short():
    env = HelpDeskEnv(0)
    for task in env.tasks("val"):
        session = env.reset(task)
        system, customer = (message["content"] for message in session.opening)
        text = f"{system}\nCustomer: {customer}\n"
        assert pieces(text) <= 90
        for action in iter(session.oracle_action, None):
            step = session.step(action)
            text += f"Agent: {action}\n"
            text += "".join(f"{m['name']}: {m['content']}\n" for m in step.messages)
        assert pieces(text) <= 170


def test_level_0_has_few_short_replies_without_ids():
    env, rng, seen = small(0, n=60), random.Random(1), set()
    for task in env.tasks("train"):
        session = env.reset(task)
        assert 8 <= len(session.admissible()) <= 10
        assert session.admissible() == env.reset(task).admissible()
        while not session.ended:
            right = session.oracle_action()
            assert len(set(session.admissible())) == len(session.admissible()) == 10
            action = rng.choice([right, *session.admissible(), "what?"])
            seen.update(replies(session.step(action)))
    assert len(seen) <= 40
    assert all(pieces(reply) <= 11 and not re.search(r"\d", reply) for reply in seen)
