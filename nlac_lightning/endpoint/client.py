"""Asking a chat server: tries, time limits, budget and cache. It answers or says why not."""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from nlac_lightning.endpoint.cache import AnswerCache
from nlac_lightning.endpoint.config import EndpointConfig
from nlac_lightning.endpoint.http import Response, send
from nlac_lightning.generation.base import Sampling

log = logging.getLogger(__name__)

RETRIED = frozenset({408, 409, 425, 429, *range(500, 600)})
SHOWN = 120
"""Characters of a server's complaint that go into the reason."""


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        text: the message's text; it may be empty.
        finish_reason: ``stop``, ``length`` or another word of the server's.
        failed: why there is no answer (``text`` is empty then), else None. Its first word names
            the kind: ``timeout``, ``connection``, ``status``, ``garbage`` or ``budget``.
        prompt_tokens, completion_tokens: as the server counts them, 0 if it does not.
        cached: it came from the disk.
    """

    text: str
    finish_reason: str = "stop"
    failed: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False


class EndpointClient:
    """Asks one server; threads may share a client.

    Args:
        config: see :class:`EndpointConfig`.

    Attributes:
        counts: ``requests`` (tries sent), ``retries``, ``cached``, ``failed`` (also by kind, as
            ``failed/timeout``), ``prompt_tokens`` and ``completion_tokens`` (paid for, so without
            the cached ones).

    Raises:
        ConfigError: the key's environment variable is not set, or the cache cannot be used.
    """

    def __init__(self, config: EndpointConfig) -> None:
        config.key()  # a missing key should stop a run before it starts
        self.config = config
        self.cache = AnswerCache(config.cache) if config.cache else None
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        seed: int | None = None,
    ) -> Answer:
        """Complete a conversation; never raises for what server or network do.

        Args:
            messages: OpenAI chat messages.
            sampling: the server applies it; ``top_k`` is sent only if set, since not all know it.
            seed: equal requests with equal seeds are equal for the cache.
        """
        body = self._body(messages, sampling or Sampling(), seed)
        request = {"url": self.config.url, "body": body}
        known = self.cache.get(request) if self.cache is not None else None
        if known is not None:
            self._count(cached=1)
            return Answer(**known, cached=True)
        answer = self._ask(json.dumps(body).encode())
        if answer.failed is not None:
            self._count(**{"failed": 1, f"failed/{answer.failed.split()[0].rstrip(':')}": 1})
            log.warning("%s gave no answer: %s", self.config.base_url, answer.failed)
            return answer
        self._count(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens)
        if self.cache is not None:
            fields = {k: v for k, v in asdict(answer).items() if k != "cached"}
            # a twin asked at the same time may have come first: all see the same answer
            answer = Answer(**self.cache.put(request, fields))
        return answer

    def chat_many(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[Answer]:
        """Complete several conversations, ``parallel`` at a time; the result has their order."""
        chosen = seeds or [None] * len(conversations)
        with ThreadPoolExecutor(self.config.parallel) as pool:
            return list(pool.map(lambda c, s: self.chat(c, sampling, s), conversations, chosen))

    def _body(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, seed: int | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [
                {"role": m["role"], "content": _encodable(m["content"])} for m in messages
            ],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            **self.config.extra,
        }
        if sampling.top_p != 1.0:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if seed is not None:
            body["seed"] = seed
        return body

    def _ask(self, body: bytes) -> Answer:
        config = self.config
        deadline = time.monotonic() + config.total_seconds
        failure = Answer("", failed="timeout: no time for a single try")
        for attempt in range(config.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._spend():
                return Answer("", failed=f"budget of {config.max_requests} requests is spent")
            answer, wait = self._try(body, min(config.request_seconds, left))
            if wait is None:
                return answer
            failure = answer
            pause = max(wait, config.backoff_seconds * 2**attempt)
            if attempt == config.retries or time.monotonic() + pause >= deadline:
                break
            self._count(retries=1)
            time.sleep(pause)
        return failure

    def _try(self, body: bytes, seconds: float) -> tuple[Answer, float | None]:
        """An answer, and how long to wait before another try; None where none can help."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = self.config.key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            response = send(
                "POST", self.config.url, body, headers, self.config.connect_seconds, seconds
            )
        except TimeoutError as error:
            return Answer("", failed=f"timeout: {error}"), 0.0
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer("", failed=f"connection: {type(error).__name__}: {error}"), 0.0
        if key:  # a server that repeats the key must not bring it into logs or the cache
            response = replace(response, body=response.body.replace(key.encode(), b"[key]"))
        if response.status != 200:
            said = " ".join(response.body[:SHOWN].decode("utf-8", "replace").split())
            retried = response.status in RETRIED
            wait = _retry_after(response.headers.get("Retry-After")) if retried else None
            return Answer("", failed=f"status {response.status}: {said}"), wait
        return _read(response)

    def _spend(self) -> bool:
        with self._lock:
            limit = self.config.max_requests
            if limit is not None and self.counts["requests"] >= limit:
                return False
            self.counts["requests"] += 1
            return True

    def _count(self, **changes: int) -> None:
        with self._lock:
            self.counts.update(changes)


def _read(response: Response) -> tuple[Answer, float | None]:
    try:
        data = json.loads(response.body)
        choice = data["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError("the content is no text")
        usage = data.get("usage") or {}
        answer = Answer(
            _encodable(text),
            str(choice.get("finish_reason") or "stop"),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
        return answer, None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        start = " ".join(response.body[:SHOWN].decode("utf-8", "replace").split())
        return Answer("", failed=f"garbage ({type(error).__name__}): {start}"), 0.0


def _retry_after(value: str | None) -> float:
    """Seconds of a ``Retry-After`` header, given as a number or as a date; 0 without one."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
        return max(seconds, 0.0) if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0


def _encodable(text: str) -> str:
    """Text without lone surrogates, which UTF-8 does not know."""
    return text.encode("utf-8", "replace").decode("utf-8")
