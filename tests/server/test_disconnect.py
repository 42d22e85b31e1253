"""A real server on loopback: clients that hang up, shutdown, curl."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.server.http_util import (
    DEADLINE_S,
    FakeEngine,
    endless,
    eventually,
    make_app,
    server_of,
    silent,
    sse_data,
)


@pytest.fixture(params=[endless, silent], ids=["decoding", "prefilling"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(request.param)
    with server_of(make_app(engine)) as url:
        yield engine, url


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_frees_the_engine(running: tuple[FakeEngine, str], streaming: bool, n: int) -> None:
    """Cases H1, H2 and H5."""
    engine, url = running
    body = json.dumps({"prompt": "hi", "stream": streaming, "n": n}).encode()
    address = httpx.URL(url)
    for _ in range(3):
        with closing(socket.create_connection((address.host, address.port))) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: len(engine.active) == n)
        eventually(lambda: not engine.active)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_a_stream_closed_after_its_first_event_frees_the_engine() -> None:
    engine = FakeEngine(endless)
    with server_of(make_app(engine)) as url:
        with httpx.stream("POST", f"{url}/generate", json={"prompt": "hi", "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"text":"x","token_ids":[120]}'
            assert engine.active
        eventually(lambda: not engine.active)


@pytest.mark.parametrize("streaming", [True, False])
def test_requests_that_outlive_the_grace_of_a_shutdown_are_told(streaming: bool) -> None:
    engine = FakeEngine(endless)
    answers: list[str] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/generate", json={"prompt": "hi", "stream": streaming}).text)

    with server_of(make_app(engine)) as url:
        client = threading.Thread(target=ask, args=(url,))
        client.start()
        eventually(lambda: len(engine.active) == 1)
    client.join(DEADLINE_S)
    assert not engine.active
    last = sse_data(answers[0])[-2] if streaming else answers[0]
    assert json.loads(last)["error"]["message"] == "the server is shutting down"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_readmes_curl_needs_no_header() -> None:
    with server_of(make_app(FakeEngine())) as url:
        body = '{"prompt": "für 😀", "stream": true}'
        run = subprocess.run(
            ["curl", "-sN", f"{url}/generate", "-d", body],
            capture_output=True,
            check=True,
            timeout=DEADLINE_S,
        )
    ids = [i for item in sse_data(run.stdout.decode())[:-1] for i in json.loads(item)["token_ids"]]
    assert bytes(ids).decode() == "für 😀"


def test_a_413_reaches_a_client_that_is_still_sending() -> None:
    with server_of(make_app(FakeEngine())) as url:
        response = httpx.post(f"{url}/generate", content=b"x" * 2**25)
        assert response.status_code == 413
        assert httpx.post(f"{url}/generate", json={"prompt": "next"}).json()["text"] == "next"


@pytest.mark.parametrize("sent", [b"", b'{"prompt": '])
def test_a_client_that_leaves_before_its_body_is_whole_leaves_nothing(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    with server_of(make_app(engine)) as url:
        address = httpx.URL(url)
        with closing(socket.create_connection((address.host, address.port))) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n" + sent)
        assert httpx.post(f"{url}/generate", json={"prompt": "next"}).json()["text"] == "next"
    assert len(engine.submitted) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_connection_is_kept_from_one_request_to_the_next() -> None:
    with server_of(make_app(FakeEngine())) as url, httpx.Client(base_url=url) as client:
        sources = set()
        for streaming in (False, True, False):
            with client.stream("POST", "/generate", json={"prompt": "hi", "stream": streaming}) as response:
                assert "h" in response.read().decode()
                sources.add(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(sources) == 1
