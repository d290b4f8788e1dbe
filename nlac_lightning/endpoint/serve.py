"""``nlac serve``: a small OpenAI-compatible chat server on a local model.

It answers one request at a time and is meant for machines without vLLM: simulated users, answerers
and policies of small models, and tests. Supported are ``messages``, ``temperature``, ``top_p``,
``max_tokens``, ``stop`` (strings) and ``seed``; equal requests get equal answers.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nlac_lightning.envs.base import Message
from nlac_lightning.errors import ConfigError
from nlac_lightning.generation.base import Completion, Generator, Request, Sampling
from nlac_lightning.roles.codec import Codec

log = logging.getLogger(__name__)

MAX_BODY = 4 * 2**20


class BadRequest(ValueError):
    """A request that cannot be answered as it is."""


@dataclass
class ChatServer:
    """Answers chat requests with a generator.

    Args:
        generator, codec: the model.
        name: how it calls itself.
        max_tokens: longest prompt with its answer; longer ones are refused with status 400.
    """

    generator: Generator
    codec: Codec
    name: str
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def complete(self, body: Any) -> dict[str, Any]:
        """The response to a request body; BadRequest for one of the wrong form."""
        try:
            messages: list[Message] = [
                {"role": str(m["role"]), "content": str(m["content"])} for m in body["messages"]
            ]
            stop = body.get("stop") or []
            sampling = Sampling(
                temperature=float(body.get("temperature", 1.0)),
                top_p=float(body.get("top_p", 1.0)),
                max_new_tokens=int(body.get("max_tokens", 256)),
                stop=self.codec.stop + tuple([stop] if isinstance(stop, str) else map(str, stop)),
            )
            seed = int(body.get("seed") or 0) % 2**62
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f"not a chat request: {error}") from error
        ids = self.codec.messages(messages) + self.codec.header()
        if len(ids) + sampling.max_new_tokens > self.max_tokens:
            raise BadRequest(f"{len(ids)} tokens and the answer exceed {self.max_tokens}")
        request = Request(ids, sampling, "base", self.codec.stop_ids, seed)
        with self._lock:
            return self._response(self.generator.generate([request])[0], len(ids))

    def _response(self, completion: Completion, prompt: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text.strip()}
        made = len(completion.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        choice = {"index": 0, "message": message, "finish_reason": completion.finish_reason}
        return {
            "object": "chat.completion",
            "model": self.name,
            "choices": [choice],
            "usage": usage,
        }

    def listen(self, host: str, port: int) -> ThreadingHTTPServer:
        """A server bound to the address; call its ``serve_forever``. Port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be used.
        """
        chat = self

        class Handler(_Handler):
            server_chat = chat

        try:
            return ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "--port", f"cannot listen on {host}:{port} ({error})", "choose another port"
            ) from error


class _Handler(BaseHTTPRequestHandler):
    server_chat: ChatServer
    timeout = 60
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            model = {"id": self.server_chat.name, "object": "model"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send(404, _error("there is /v1/chat/completions and /v1/models"))

    def do_POST(self) -> None:
        self.close_connection = True
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self._send(404, _error("there is only /v1/chat/completions"))
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= MAX_BODY:
                raise BadRequest("the body is too long")
            self._send(200, self.server_chat.complete(json.loads(self.rfile.read(length))))
        except (ValueError, RecursionError) as error:  # BadRequest and JSON errors among them
            self._send(400, _error(str(error)))
        except Exception as error:
            log.exception("a request failed")
            self._send(500, _error(type(error).__name__))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
