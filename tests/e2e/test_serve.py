"""`dspark-serve` as a user runs it: a process of its own, real HTTP, the demo model."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.demo

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
QUESTION = {
    "messages": [{"role": "user", "content": "What is 12 times 7? Explain step by step."}],
    "temperature": 0,
    "max_tokens": 48,
}
LONG = {"prompt": "The history of the world, in ten thousand words:", "ignore_eos": True, "max_tokens": 800}


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server on a free port, ready; it is killed when it is still there at the end."""
    command = [sys.executable, "-m", "server.cli", "--port", "0", "--max-model-len", "1024", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    output: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: output.extend(process.stdout or []))
    reader.start()
    try:
        eventually(lambda: process.poll() is not None or "curl" in "".join(output))
        found = re.search(r"http://127\.0\.0\.1:(\d+)/generate", "".join(output))
        assert found, "".join(output)
        with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=DEADLINE_S) as client:
            eventually(lambda: answers(client))
            yield process, client
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def running(client: httpx.Client) -> int:
    return int(client.get("/health").json()["running"])


def events(client: httpx.Client, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def hang_up(client: httpx.Client, body: dict[str, Any]) -> None:
    """Send a request and close the connection while it runs."""
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(head + content)
        eventually(lambda: running(client) == 1)


def test_a_server_from_start_to_end() -> None:
    with serving("--verify", "full") as (process, client):
        check_texts(client)
        check_clients_that_leave(client)
        assert client.post("/generate", json=QUESTION).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def check_texts(client: httpx.Client) -> None:
    """A stream, a whole reply and plain decoding say the same."""
    whole = client.post("/generate", json=QUESTION).json()
    assert len(whole["text"]) > 40
    assert whole["usage"]["completion_tokens"] == len(whole["token_ids"]) <= 48
    assert whole["speculation"]["acceptance_length"] > 1.5  # 2.14; a draft that is misaligned or not loaded is near 1.0
    parts = list(events(client, QUESTION))
    assert len(parts) > 3
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    last = parts[-1]
    assert [last[key] for key in ("finish_reason", "usage", "speculation")] == [
        whole[key] for key in ("finish_reason", "usage", "speculation")
    ]
    assert not any("finish_reason" in part for part in parts[:-1])
    plain = client.post("/generate", json={**QUESTION, "speculative": False}).json()
    assert (plain["text"], plain["token_ids"]) == (whole["text"], whole["token_ids"])
    assert plain["speculation"]["rounds"] == 0


def check_clients_that_leave(client: httpx.Client) -> None:
    """Whoever goes away frees the place, streaming or not."""
    stream = events(client, LONG)
    next(stream)
    next(stream)
    assert running(client) == 1
    stream.close()
    eventually(lambda: running(client) == 0)
    hang_up(client, LONG)
    eventually(lambda: running(client) == 0)
