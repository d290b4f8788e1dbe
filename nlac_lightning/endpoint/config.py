"""Where a chat server is and how patiently it is asked. No secret is ever a setting."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nlac_lightning.errors import ConfigError, require_positive

OWN_FIELDS = {"model", "messages", "seed", "temperature", "top_p", "max_tokens", "stop", "stream"}


@dataclass
class EndpointConfig:
    """An OpenAI-compatible chat server (vLLM, llama.cpp, Ollama, a hosted service)."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Address up to ``/v1``; ``/chat/completions`` is appended."""
    model: str = "default"
    """Name of the model as the server knows it."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key, never the key itself."""
    connect_seconds: float = 10.0
    """Longest wait for a connection."""
    request_seconds: float = 120.0
    """Longest duration of one try, from connection to the last byte."""
    total_seconds: float = 300.0
    """Longest duration of an answer, all tries and the waits between them."""
    retries: int = 4
    """Further tries after a dropped connection, a timeout, 408, 409, 425, 429 or 5xx."""
    backoff_seconds: float = 1.0
    """First wait between tries; each later one doubles. A ``Retry-After`` header goes first."""
    max_requests: int | None = None
    """Budget: tries sent to the server in all, answers from the cache are free. None: no limit."""
    parallel: int = 16
    """Requests in flight at a time."""
    cache: str | None = None
    """SQLite file of answers; a run that asks the same again asks the file. None: no cache."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request body, such as ``{"reasoning_effort": "low"}``."""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError("endpoint.base_url", "it is no address", "write http(s)://HOST/v1")
        if url.username or url.password or url.query:
            # the message does not repeat the address, which may hold the secret
            raise ConfigError(
                "endpoint.base_url",
                "it holds a user, a password or a query",
                "give the key through the environment variable that endpoint.api_key_env names",
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise ConfigError(
                "endpoint.api_key_env",
                "it is no name of an environment variable (is it the key itself?)",
                "write a name in capitals such as OPENAI_API_KEY",
            )
        for name in ("connect_seconds", "request_seconds", "total_seconds", "parallel"):
            require_positive(f"endpoint.{name}", getattr(self, name))
        require_positive("endpoint.retries", self.retries, zero=True)
        require_positive("endpoint.backoff_seconds", self.backoff_seconds, zero=True)
        if self.max_requests is not None:
            require_positive("endpoint.max_requests", self.max_requests, zero=True)
        for name in self.extra:
            if name in OWN_FIELDS or re.search("key|auth|token$|secret", name, re.I):
                raise ConfigError(
                    "endpoint.extra", f"'{name}' may not stand here", "use the setting of that name"
                )

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + "/chat/completions"

    def key(self) -> str | None:
        """The key, read anew each time so that no object holds it.

        Raises:
            ConfigError: the variable is not set, or its value cannot be sent in a header.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(
                f"environment variable {self.api_key_env}",
                "it is not set, or no key" if not key else "it holds characters no key has",
                f"export {self.api_key_env}=...",
            )
        return key
