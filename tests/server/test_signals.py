"""`dspark-serve` as a process: from the first second of loading to the last of its end. The engine is scripted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from server import cli
from tests.server.http_util import DEADLINE_S, eventually, sse_data

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A running `dspark-serve` on a free port; yields the process, its URL and what it printed."""
    command = [
        sys.executable,
        "-m",
        "tests.server.http_util",
        "--port",
        "0",
        "--log-level",
        "warning",
        *flags,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while "curl" not in printed:
                line = process.stdout.readline()
                assert line, process.communicate()[1]
                printed += line
            found = re.search(r"http://[^/]+", printed)
            assert found is not None
            yield process, found[0], printed
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; the exit code and what was left on stderr."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


def test_it_says_what_it_serves_and_ends_cleanly_on_a_signal() -> None:
    with serving("--drain-seconds", "10000") as (process, url, printed), httpx.Client(base_url=url) as kept:
        assert "target       tiny-target (llama, 2 layers)" in printed
        assert kept.post("/generate", json={"prompt": "hi"}).json()["text"] == "hi"
        process.send_signal(signal.SIGINT)
        assert end(process) == (0, ""), "nothing runs: there is nothing to wait for"


@contextmanager
def draining(*flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, Iterator[str]]]:
    """A server that got SIGTERM while a stream without an end runs: the process, a client, the stream's lines."""
    with serving("--ckpt", "endless", *flags) as (process, url, _), httpx.Client(base_url=url) as client:
        assert client.get("/health").json()["status"] == "ok"
        with client.stream("POST", "/generate", json={"prompt": "hi", "stream": True}, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            assert "x" in next(lines)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{url}/health").status_code == 503)
            yield process, client, lines


def test_running_streams_finish_in_the_drain() -> None:
    """Cases T6 and T7."""
    with serving("--ckpt", "hundred", "--drain-seconds", "10000") as (process, url, _):
        body = {"prompt": "hi", "stream": True}
        ask = partial(httpx.stream, "POST", f"{url}/generate", json=body, timeout=DEADLINE_S)
        with ask() as first, ask() as second:
            streams = [first.iter_lines(), second.iter_lines()]
            for lines in streams:
                assert "x" in next(lines)
            process.send_signal(signal.SIGTERM)
            for lines in streams:
                *texts, last, done = [line for line in lines if line]
                assert (len(texts), done) == (99, "data: [DONE]")
                assert '"finish_reason":"length"' in last
        assert end(process) == (0, "")


def test_in_the_drain_new_requests_are_told_to_come_back_and_running_streams_go_on() -> None:
    """Cases T6 and T7."""
    with draining("--drain-seconds", "60") as (process, client, lines):
        assert client.get("/health").json() == {"status": "draining", "running": 1, "waiting": 0}
        for ask in (client.post, httpx.post):  # on a connection that was kept, and on a new one
            refused = ask(str(client.base_url.join("/generate")), json={"prompt": "hi"})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "60")
            assert refused.json()["error"]["code"] == "draining"
        for _ in range(50):
            assert next(lines) != "data: [DONE]"
        process.send_signal(signal.SIGTERM)
        assert end(process) == (0, ""), "a second signal does not wait"


def test_a_stream_that_outlives_the_drain_is_cut_with_an_error() -> None:
    with draining("--drain-seconds", "1", "--log-format", "json", "--log-level", "info") as (process, _, lines):
        data = sse_data("".join(f"{line}\n\n" for line in lines if line))
        assert "the server is shutting down" in data[-2]
        assert data[-1] == "[DONE]"
        code, errors = end(process)
        assert code == 0
    logged = [json.loads(line) for line in errors.splitlines()]  # every line, uvicorn's own too
    assert "uvicorn.error" in {line["logger"] for line in logged}
    assert not [line for line in logged if line["level"] == "error"]
    assert [line["message"] for line in logged if line["level"] == "warning"] == [
        "cut after 1 s (--drain-seconds): 1 running requests"
    ]
    (stream,) = [line for line in logged if line.get("path") == "/generate"]
    assert (stream["status"], stream["error"]) == (200, "engine_unavailable")


def test_until_it_can_serve_it_says_that_it_loads() -> None:
    """Case T3."""
    with loading() as (process, url):
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        assert health.headers["Retry-After"] == "2"
        assert health.headers["X-Request-Id"]
        for response in (httpx.get(f"{url}/v1/models"), httpx.post(f"{url}/generate", json={"prompt": "hi"})):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
        with httpx.Client(base_url=url) as early:
            early.get("/health")
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert process.stdout is not None
            while "curl" not in process.stdout.readline():
                pass
            assert early.post("/generate", json={"prompt": "hi"}).json()["text"] == "hi"


def test_a_signal_while_loading_ends_it() -> None:
    with loading() as (process, _):
        process.send_signal(signal.SIGTERM)
        assert end(process) == (0, "")


@contextmanager
def loading() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that loads until a line is written to it; the process and its URL."""
    command = [sys.executable, "-m", "tests.server.http_util", "--ckpt", "slow", "--log-level", "warning"]
    port = free_port()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def free_port() -> int:
    with cli.listen("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
    return port
