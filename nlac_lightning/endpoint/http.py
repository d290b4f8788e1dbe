"""One HTTP request with a hard time limit.

The standard library's client is used as it is: it follows no redirect, so a key never reaches
another host, and its socket can be shut from a timer, so a server that drips a byte a minute is
cut off as well as one that is silent.
"""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message as Headers
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

MAX_BYTES = 16 * 2**20
"""Longer answers are cut, and then no JSON."""


@dataclass(frozen=True)
class Response:
    """Status, headers and body as they came."""

    status: int
    headers: Headers
    body: bytes


def send(
    method: str,
    url: str,
    body: bytes | None,
    headers: dict[str, str],
    connect_seconds: float,
    seconds: float,
) -> Response:
    """Send ``body`` and read the whole answer.

    Args:
        method: ``GET`` or ``POST``.
        url: http or https; for https the proxy of the environment (``HTTPS_PROXY``) is used.
        body, headers: what to send.
        connect_seconds: limit of the connection.
        seconds: limit of everything after it.

    Raises:
        TimeoutError: a limit was reached.
        OSError, http.client.HTTPException: no connection, or not HTTP.
    """
    connection = _connection(url, min(connect_seconds, seconds))
    expired = threading.Event()
    try:
        connection.connect()
        plain = connection.sock

        def cut() -> None:
            expired.set()
            with suppress(OSError):  # an SSL socket's own shutdown would touch the reader's state
                socket.socket.shutdown(plain, socket.SHUT_RDWR)

        plain.settimeout(seconds)
        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            parts = urlsplit(url)
            connection.request(method, parts.path or "/", body, headers)
            answer = connection.getresponse()
            response = Response(answer.status, answer.headers, answer.read(MAX_BYTES))
        finally:
            timer.cancel()
        if expired.is_set():
            raise TimeoutError
        return response
    except (OSError, http.client.HTTPException) as error:
        if expired.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no whole answer within {seconds:.0f} s") from error
        raise
    finally:
        connection.close()


def _connection(url: str, seconds: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)
    proxy = urlsplit(getproxies().get("https", ""))
    if not proxy.hostname or proxy_bypass(parts.hostname):
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds)
    tunnel = http.client.HTTPSConnection(proxy.hostname, proxy.port, timeout=seconds)
    tunnel.set_tunnel(parts.hostname, parts.port)
    return tunnel
