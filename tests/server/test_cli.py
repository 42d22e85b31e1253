"""`dspark-serve`: flags, help, start-up failures, signals. Processes run with a scripted engine."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from dspark_core.errors import CheckpointError
from dspark_core.settings import flag
from server import cli
from server.config import ServerConfig
from tests.server.http_util import DEADLINE_S, sse_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """main() takes over the signals; give them back."""
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


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


def test_flags_are_the_settings() -> None:
    assert cli.parse_config([]) == ServerConfig()
    config = cli.parse_config(
        ["--ckpt", "d", "--target=t", "--max-model-len", "512", "--kv-memory-fraction", "0.5", "--seed", "7"]
    )
    expected = ServerConfig(ckpt="d", target="t", max_model_len=512, kv_memory_fraction=0.5, seed=7)
    assert config == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "80"], "unknown argument --prot, expected --port"),
        (["--zzzzzz=1"], "unknown argument --zzzzzz=1, expected one of --ckpt --target"),
        (["model"], "unknown argument model, expected one of --ckpt --target"),
        (["--max-num", "3"], "unknown argument --max-num, expected --max-num-seqs"),
        (["--port"], "argument --port: expected one argument"),
        (["--port", "http"], '--port: found "http", expected a valid integer'),
        (["--port", "-1"], '--port: found "-1", expected greater than or equal to 0'),
        (["--dtype", "int8"], "--dtype: found \"int8\", expected 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["--kv-memory-fraction", "nan"], '--kv-memory-fraction: found "nan", expected a finite number'),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dspark-serve: error: {message}")
    assert err.count("\n") == 1


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for title in cli.GROUPS.values():
        assert f"{title}:" in text
    for name, field in ServerConfig.model_fields.items():
        default = "" if field.default is None else f" (default: {field.default})"
        assert re.search(rf"{flag(name)} \S+ {re.escape(str(field.description) + default)}", text), name
    assert "--dtype {auto,float32,bfloat16,float16}" in text
    assert "--max-model-len N" in text


def test_help_needs_no_torch() -> None:
    code = "import sys, server.cli; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("host", "port", "shown"),
    [("127.0.0.1", 8000, "127.0.0.1:8000"), ("0.0.0.0", 80, "localhost:80"), ("::1", 9, "[::1]:9")],
)
def test_the_banner_is_one_block_with_a_curl_line(host: str, port: int, shown: str) -> None:
    body = '{"prompt": "The capital of France is", "max_tokens": 32, "stream": true}'
    assert cli.banner({"target": "T", "KV capacity": "10 tokens"}, host, port).splitlines() == [
        "dspark serves",
        "  target       T",
        "  KV capacity  10 tokens",
        "try",
        f"  curl -N http://{shown}/generate -d '{body}'",
    ]


def unloadable(config: ServerConfig, sock: socket.socket) -> None:
    raise CheckpointError(f"{config.ckpt}/config.json does not exist")


def test_a_start_that_fails_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "serve", unloadable)
    assert cli.main(["--port", "0", "--ckpt", "/nowhere"]) == 1
    assert capsys.readouterr() == ("", "dspark-serve: error: /nowhere/config.json does not exist\n")


def test_a_port_in_use_is_told_before_any_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "serve", unloadable)
    with closing(cli.listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--port", str(port)]) == 1
    where = f"dspark-serve: error: cannot listen on 127.0.0.1 port {port}"
    assert capsys.readouterr().err == f"{where}: the port is in use; choose others with --host and --port\n"


def test_a_host_that_is_not_here_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--host", "192.0.2.1", "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dspark-serve: error: cannot listen on 192.0.2.1 port 0: ")
    assert err.count("\n") == 1


def test_it_says_what_it_serves_and_ends_cleanly_on_a_signal() -> None:
    with serving() as (process, url, printed):
        assert "target       tiny-target (llama, 2 layers)" in printed
        assert httpx.post(f"{url}/generate", json={"prompt": "hi"}).json()["text"] == "hi"
        process.send_signal(signal.SIGINT)
        assert end(process) == (0, "")


def test_running_streams_go_on_after_a_signal_and_are_cut_with_an_error() -> None:
    with serving("--ckpt", "endless") as (process, url, _):
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            assert "x" in next(lines)
            process.send_signal(signal.SIGTERM)
            address = httpx.URL(url)
            while not refused(address.host, address.port or 0):
                next(lines)
            after = [line for line in lines if line]
        assert len(after) > 10, "no events during the grace"
        data = sse_data("".join(f"{line}\n\n" for line in after))
        assert "shutting down" in data[-2]
        assert data[-1] == "[DONE]"
        code, errors = end(process)
        assert code == 0
        assert "graceful shutdown exceeded" in errors
        assert "Traceback" not in errors


def refused(host: str, port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((host, port)) != 0


def test_a_second_signal_does_not_wait_for_the_grace_to_end() -> None:
    with serving("--ckpt", "endless") as (process, url, _):
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            assert "x" in next(lines)
            process.send_signal(signal.SIGTERM)
            address = httpx.URL(url)
            while not refused(address.host, address.port or 0):
                next(lines)
            process.send_signal(signal.SIGTERM)
            assert end(process) == (0, ""), "uvicorn logs an error when the grace is over"


def test_a_signal_while_loading_ends_it() -> None:
    command = [sys.executable, "-m", "tests.server.http_util", "--port", "0", "--ckpt", "slow"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGTERM)
            assert end(process) == (0, "")
        finally:
            process.kill()
