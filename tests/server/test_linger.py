"""Answers that are ready before their request was read, as clients meet them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server import linger
from tests.server.http_util import DEADLINE_S, FakeEngine, make_app, server_of

SIZE = 2**18  # more than is read without anybody asking for it


def draining() -> FastAPI:
    app = make_app(FakeEngine())
    app.state.drain.begun = True
    return app


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=DEADLINE_S)


def head(path: str, framing: str = f"Content-Length: {SIZE}") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode()


def read_answer(client: socket.socket) -> bytes:
    """An answer up to the last byte of its body, the connection still open."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += client.recv(1)
    size = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < size:
        body += client.recv(size - len(body))
    return answer + body


@pytest.mark.parametrize(
    ("app", "path", "status"),
    [
        (draining, "/generate", 503),
        (lambda: make_app(FakeEngine(), api_key=("key",)), "/generate", 401),
        (lambda: make_app(FakeEngine()), "/nowhere", 404),
        (lambda: make_app(FakeEngine()), "/health", 405),
    ],
)
def test_the_client_may_send_the_rest_after_the_answer(
    app: Callable[[], Any], path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases T6 and T7: who is refused learns why, also when the connection is to be closed."""
    monkeypatch.setattr(linger, "LINGER_S", DEADLINE_S)
    with server_of(app()) as url, closing(connect(url)) as client:
        client.sendall(head(path))
        answer = read_answer(client)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        client.sendall(b"x" * SIZE)  # a closed connection would be reset by this
        client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        rest = b""
        while received := client.recv(2**16):
            rest += received
        closes = b"connection: close" in answer.lower()
        assert rest.startswith(b"" if closes else b"HTTP/1.1 200 ")
        assert (rest == b"") == closes


def test_a_body_that_is_too_long_is_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "LINGER_S", DEADLINE_S)
    with server_of(make_app(FakeEngine(), max_body_mb=1)) as url, closing(connect(url)) as client:
        client.sendall(head("/generate", "Transfer-Encoding: chunked"))
        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        client.sendall(chunk * 2)
        assert read_answer(client).startswith(b"HTTP/1.1 413 ")
        client.sendall(chunk * 2 + b"0\r\n\r\n")
        client.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("leaves", [True, False])
def test_nobody_is_waited_for_longer_than_that(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a client that leaves nor one that sends nothing more keeps its connection."""
    monkeypatch.setattr(linger, "LINGER_S", 10 * DEADLINE_S if leaves else 0.05)
    with server_of(draining()) as url, closing(connect(url)) as client:
        client.sendall(head("/generate") + b"x")
        assert read_answer(client).startswith(b"HTTP/1.1 503 ")
        if leaves:
            client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_the_end_of_the_server_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linger, "LINGER_S", 100 * DEADLINE_S)
    with server_of(draining()) as url, closing(connect(url)) as client:
        client.sendall(head("/generate"))
        read_answer(client)
    assert not [record for record in caplog.records if record.levelname == "ERROR" and record.exc_info]
