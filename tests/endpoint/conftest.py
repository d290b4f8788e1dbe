"""Real HTTP servers on loopback: one that fails as told, and one with a real model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nlac_lightning.backbone import Backbone, BackboneConfig
from nlac_lightning.endpoint.serve import ChatServer
from nlac_lightning.generation.in_process import InProcessGenerator
from nlac_lightning.roles.codec import make_codec

Behaviour = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes | str, **headers: str) -> None:
    data = body.encode() if isinstance(body, str) else body
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def answer(text: str | None) -> str:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def hang(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    time.sleep(4)


def drip(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    """A byte now and then, in headers that never end: no single read ever times out."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(40):
        handler.wfile.write(b"a")
        handler.wfile.flush()
        time.sleep(0.1)


def drop(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def half(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


FAULTS: dict[str, Behaviour] = {"hang": hang, "drip": drip, "drop": drop, "half": half}


class FaultServer:
    """Follows a plan, its last entry for ever; keeps what it was asked.

    An entry names one of :data:`FAULTS`, or is a status, a body and headers.
    """

    def __init__(self) -> None:
        self.plan: list[Any] = [(200, answer("fine"), {})]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = len(outer.requests)
                outer.requests.append(body)
                outer.keys.append(self.headers.get("Authorization"))
                outer.times.append(time.monotonic())
                try:
                    entry = outer.plan[min(number, len(outer.plan) - 1)]
                    if isinstance(entry, str):
                        FAULTS[entry](self, body)
                    else:
                        send(self, entry[0], entry[1], **entry[2])
                except OSError:
                    pass  # the client has gone

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


def running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def faults() -> Iterator[FaultServer]:
    """A server that misbehaves as its ``plan`` says."""
    server = FaultServer()
    server.server.daemon_threads = True
    server.server.block_on_close = False
    for _ in running(server.server):
        yield server


@pytest.fixture(scope="session")
def real_server(smollm2_path: str) -> Iterator[str]:
    """Address of the real SmolLM2-135M-Instruct behind ``nlac serve``'s server."""
    backbone = Backbone(BackboneConfig(smollm2_path, lora_r=1))
    chat = ChatServer(
        InProcessGenerator(backbone), make_codec("auto", backbone.tokenizer), "smollm2", 2048
    )
    server = chat.listen("127.0.0.1", 0)
    for _ in running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
