"""The endpoint client against real servers: faults, limits, budget, cache, secrecy of the key."""

from __future__ import annotations

import email.utils
import json
import logging
import pickle
import sqlite3
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from nlac_lightning.endpoint import AnswerCache, EndpointClient, EndpointConfig
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Sampling

HELLO = [{"role": "user", "content": "hello"}]
SECRET = "sk-very-secret-0123456789"
HTML = (200, "<html><body>502 Bad Gateway</body></html>", {})


def client(url: str, **options: Any) -> EndpointClient:
    quick = {"backoff_seconds": 0.01, "request_seconds": 5.0, "total_seconds": 10.0, "retries": 2}
    return EndpointClient(EndpointConfig(base_url=url, **{**quick, **options}))


def test_a_real_model_answers_and_a_second_run_asks_the_disk(
    real_server: str, tmp_path: Path
) -> None:
    options = {"cache": str(tmp_path / "answers.sqlite"), "model": "smollm2"}
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    runs = []
    for _ in range(2):
        asked = client(real_server, **options, request_seconds=600, total_seconds=600)
        runs.append(asked.chat_many([HELLO] * 3, sampling, [1, 2, 3]))
        counts = asked.counts
    first, second = runs
    assert all(a.failed is None and a.text and a.completion_tokens for a in first)
    assert [a.text for a in first] == [a.text for a in second]
    assert len({a.text for a in first}) > 1, "other seeds are other requests"
    assert [a.cached for a in second] == [True] * 3
    assert counts["cached"] == 3 and not counts["requests"]
    with urllib.request.urlopen(f"{real_server}/models") as response:
        assert json.load(response)["data"][0]["id"] == "smollm2"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": [], "max_tokens": -1}', b"\xff"],
)
def test_the_server_refuses_what_is_no_request(real_server: str, body: bytes) -> None:
    request = urllib.request.Request(f"{real_server}/chat/completions", body, method="POST")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 400 and json.load(error.value)["error"]["message"]


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_slow_server_costs_bounded_time(faults: Any, fault: str) -> None:
    faults.plan = [fault]
    began = time.monotonic()
    answer = client(faults.url, request_seconds=0.3, total_seconds=2.0, retries=2).chat(HELLO)
    assert answer.failed and answer.failed.startswith("timeout") and answer.text == ""
    assert 0.9 <= time.monotonic() - began < 2.5 and len(faults.requests) == 3


def test_the_total_limit_holds_whatever_the_number_of_tries(faults: Any) -> None:
    faults.plan = ["hang"]
    began = time.monotonic()
    answer = client(faults.url, request_seconds=0.4, total_seconds=1.0, retries=50).chat(HELLO)
    assert answer.failed and time.monotonic() - began < 1.6


@pytest.mark.parametrize(
    "first", ["drop", "half", (500, "oops", {}), (429, "slow down", {}), HTML, (200, "", {})]
)
def test_what_passes_is_tried_again(faults: Any, first: Any) -> None:
    faults.plan = [first, (200, faults.answer("fine"), {})]
    asked = client(faults.url)
    answer = asked.chat(HELLO)
    assert answer.failed is None and answer.text == "fine"
    assert asked.counts["requests"] == 2 and asked.counts["retries"] == 1


def test_retry_after_is_kept(faults: Any) -> None:
    faults.plan = [(429, "", {"Retry_After": "0.6"}), (200, faults.answer("fine"), {})]
    assert client(faults.url).chat(HELLO).text == "fine"
    assert faults.times[1] - faults.times[0] >= 0.6
    faults.requests.clear()
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    faults.plan = [(503, "maintenance", {"Retry_After": later})]
    began = time.monotonic()
    answer = client(faults.url).chat(HELLO)
    assert answer.failed == "status 503: maintenance", "it is over before the server wants"
    assert len(faults.requests) == 1 and time.monotonic() - began < 1


@pytest.mark.parametrize("wait", ["nan", "inf", "-5", "soon", "Fri, 99 Foo"])
def test_senseless_retry_after_is_passed_over(faults: Any, wait: str) -> None:
    faults.plan = [(429, "", {"Retry_After": wait}), (200, faults.answer("fine"), {})]
    assert client(faults.url).chat(HELLO).text == "fine"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
def test_what_cannot_pass_is_not_tried_again(faults: Any, status: int) -> None:
    faults.plan = [(status, "no such model", {"Location": "http://127.0.0.1:1/"})]
    answer = client(faults.url).chat(HELLO)
    assert answer.failed == f"status {status}: no such model" and len(faults.requests) == 1


@pytest.mark.parametrize(
    "body",
    [HTML[1], "", "null", "[]", "{}", '{"choices": []}',
     '{"choices": [{"message": {"content": [1]}}]}',
     '{"choices": "x"}', "[" * 100_000, b"\xff\xfe\x00"],
)  # fmt: skip
def test_garbage_is_a_named_failure(faults: Any, body: Any) -> None:
    faults.plan = [(200, body, {})]
    asked = client(faults.url, retries=1)
    answer = asked.chat(HELLO)
    assert answer.failed and answer.failed.startswith("garbage") and len(answer.failed) < 200
    assert asked.counts["failed"] == asked.counts["failed/garbage"] == 1


def test_an_empty_answer_and_broken_unicode_are_answers(faults: Any) -> None:
    faults.plan = [(200, faults.answer(None), {}), (200, faults.answer("a\ud800b"), {})]
    asked = client(faults.url)
    assert asked.chat(HELLO).text == "" and asked.chat(HELLO).text == "a?b"
    assert asked.chat([{"role": "user", "content": "\udfff"}]).failed is None


def test_nobody_listens() -> None:
    answer = client("http://127.0.0.1:9/v1").chat(HELLO)
    assert answer.failed and answer.failed.startswith("connection: ConnectionRefusedError")


def test_the_budget_counts_tries_but_not_the_cache(faults: Any, tmp_path: Path) -> None:
    faults.plan = [(500, "", {}), (200, faults.answer("fine"), {})]
    asked = client(faults.url, max_requests=2, cache=str(tmp_path / "a.sqlite"))
    assert asked.chat(HELLO).text == "fine"
    assert (
        asked.chat([{"role": "user", "content": "more"}]).failed == "budget of 2 requests is spent"
    )
    assert asked.chat(HELLO).cached and len(faults.requests) == 2


def test_the_cache_is_keyed_by_the_whole_request_and_holds_no_failure(
    faults: Any, tmp_path: Path
) -> None:
    cache = str(tmp_path / "a.sqlite")
    faults.plan = [(400, "", {}), *((200, faults.answer(str(n)), {}) for n in range(9))]
    asked = client(faults.url, cache=cache, extra={"top_k": 5})
    assert asked.chat(HELLO).failed and asked.chat(HELLO).text == "0"
    warm = Sampling(temperature=0.5)
    assert asked.chat(HELLO, warm).text == "1" and asked.chat(HELLO, warm, seed=1).text == "2"
    assert client(faults.url, cache=cache).chat(HELLO).text == "3", "without top_k"
    assert client(faults.url, cache=cache, model="other").chat(HELLO).text == "4"
    again = asked.chat(HELLO, warm, seed=1)
    assert again.text == "2" and again.cached and len(AnswerCache(cache)) == 5
    assert faults.requests[1]["top_k"] == 5


def test_answers_asked_for_side_by_side_keep_their_order(faults: Any, tmp_path: Path) -> None:
    asked = client(faults.url, parallel=8, cache=str(tmp_path / "a.sqlite"))
    questions = [[{"role": "user", "content": str(n % 10)}] for n in range(40)]
    answers = asked.chat_many(questions)
    assert [a.text for a in answers] == ["fine"] * 40
    assert asked.cache is not None and len(asked.cache) == 10
    assert asked.counts["requests"] + asked.counts["cached"] == 40


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"endpoint\.cache"):
        AnswerCache(path)


def test_a_cache_that_fails_later_costs_only_the_cache(faults: Any, tmp_path: Path) -> None:
    asked = client(faults.url, cache=str(tmp_path / "a.sqlite"))
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute("DROP TABLE answers")
    assert asked.chat(HELLO).text == "fine"


def test_the_key_is_sent_and_shown_nowhere(
    faults: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NLAC_TEST_KEY", SECRET)
    echo = faults.answer(f"your key is {SECRET}")
    faults.plan = [(200, echo, {}), (401, f"bad key {SECRET}", {}), (200, f"<b>{SECRET}", {})]
    cache = tmp_path / "a.sqlite"
    with caplog.at_level(logging.DEBUG):
        asked = client(faults.url, api_key_env="NLAC_TEST_KEY", cache=str(cache), retries=0)
        answers = [asked.chat([{"role": "user", "content": str(n)}]) for n in range(3)]
    assert faults.keys == [f"Bearer {SECRET}"] * 3
    assert answers[0].text == "your key is [key]" and all(a.failed for a in answers[1:])
    parser = ArgumentParser()
    parser.add_argument("--endpoint", type=EndpointConfig)
    saved = parser.dump(parser.parse_args(["--endpoint.api_key_env", "NLAC_TEST_KEY"]))
    seen = [caplog.text, repr(asked.config), repr(vars(asked)), saved, repr(answers)]
    seen += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()]
    seen.append(pickle.dumps(asked).decode("latin-1"))
    assert SECRET not in "".join(seen) and "NLAC_TEST_KEY" in saved
    assert pickle.loads(pickle.dumps(asked)).chat(HELLO).failed, "a copy in a worker works too"


def test_a_key_that_is_missing_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NLAC_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="NLAC_TEST_KEY"):
        EndpointClient(EndpointConfig(api_key_env="NLAC_TEST_KEY"))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("base_url", "localhost:8000"),
        ("base_url", "ftp://host/v1"),
        ("base_url", f"https://user:{SECRET}@host/v1"),
        ("base_url", f"https://host/v1?key={SECRET}"),
        ("api_key_env", SECRET),
        ("request_seconds", 0),
        ("retries", -1),
        ("parallel", 0),
        ("extra", {"api_key": SECRET}),
        ("extra", {"messages": []}),
    ],
)
def test_wrong_settings_are_named_and_secrets_not_repeated(field: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"endpoint\.{field}") as error:
        EndpointConfig(**{field: wrong})
    assert SECRET not in str(error.value)
