"""`dspark-serve`: where settings come from, help, start-up failures, --check."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dspark_core.errors import CheckpointError
from dspark_core.settings import UsageError, as_typed, flag
from server import cli
from server.config import ServerConfig
from tests.server.http_util import DEADLINE_S, FakeEngine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """main() takes over the signals; give them back."""
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


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
        (["--zzzzzz=1"], "unknown argument --zzzzzz, expected one of --config --ckpt --target"),
        (["model"], "unknown argument model, expected one of --config --ckpt --target"),
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


def test_a_flag_wins_over_the_variable_the_variable_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax_num_seqs = 2\ndraft_len = 3\ncors_origins = ["http://a", "http://b"]\n')
    environ = {"DSPARK_CONFIG": str(file), "DSPARK_PORT": "10", "DSPARK_MAX_NUM_SEQS": "20", "DSPARK_CACHE": "/c"}
    config = cli.parse_config(["--port", "100", "--check"], environ)
    assert (config.port, config.max_num_seqs, config.draft_len, config.page_size) == (100, 20, 3, 64)
    assert config.cors_origins == ("http://a", "http://b")
    assert config.check
    other = tmp_path / "other.toml"
    other.write_text("port = 5")
    assert cli.parse_config(["--config", str(other)], {"DSPARK_CONFIG": str(file)}).port == 5, "the flag's file alone"


@pytest.mark.parametrize(
    ("argv", "environ", "content", "message"),
    [
        ([], {"DSPARK_PORT": "x"}, "", 'DSPARK_PORT: found "x", expected a valid integer'),
        ([], {"DSPARK_TARGET": ""}, "", 'DSPARK_TARGET: found "", expected at least 1 character'),
        ([], {"DSPARK_API_KEY": ""}, "", "DSPARK_API_KEY: found a key that is empty"),
        ([], {}, "port = 'x'", 'FILE: port: found "x", expected a valid integer'),
        ([], {}, "prot = 1", "FILE: unknown key prot, expected port"),
        ([], {}, "max-num-seqs = 1", "FILE: unknown key max-num-seqs, expected max_num_seqs"),
        ([], {}, "[serve]\nport = 1", "FILE: unknown key serve, expected "),
        ([], {}, "port = ", "FILE cannot be read as TOML: "),
        (["--port", "y"], {"DSPARK_PORT": "x"}, "port = 'x'", '--port: found "y", expected'),
    ],
)
def test_a_complaint_names_the_place_of_the_value(
    argv: list[str], environ: dict[str, str], content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        cli.parse_config([*argv, "--config", str(file)], environ)
    assert str(caught.value).replace(str(file), "FILE").startswith(message)


def test_no_key_is_shown_whatever_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("api_key = [7777]")
    for argv in (
        ["--api-key", "ok 7777"],
        ["--api-key", "ok,", "7777"],
        ["--api-keys=7777"],
        ["--config", str(file)],
        ["--api-key", "7777", "--port", "x"],
    ):
        assert cli.main(argv) == 2
        assert "7777" not in "".join(capsys.readouterr())


def test_a_variable_that_is_no_setting_is_a_warning_without_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSPARK_API_KEYS", "hunter2")
    monkeypatch.setenv("DSPARK_CACHE", "/nowhere")
    monkeypatch.setattr(cli, "serve", unloadable)
    assert cli.main(["--port", "0"]) == 1
    assert caplog.messages == ["DSPARK_API_KEYS is set, which is no setting: expected DSPARK_API_KEY"]


def checked(*flags: str, engine: Any = None) -> int:
    """The exit code of `dspark-serve --check` around an engine, or around what loading raises."""

    def load(config: ServerConfig) -> FakeEngine:
        if isinstance(engine, Exception):
            raise engine
        return FakeEngine()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.loader.load_engine", load)
        return cli.main(["--check", *flags])


def test_check_says_what_would_be_served_and_needs_no_port(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(cli.listen("127.0.0.1", 0)) as taken:
        assert checked("--port", str(taken.getsockname()[1]), "--api-key", "hunter2,hunter3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dspark would serve"
    assert "  target       tiny-target (llama, 2 layers)" in lines
    assert "  access       with an API key, of which there are 2" in lines
    assert "hunter" not in "".join(lines)


def test_check_says_why_it_would_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(engine=CheckpointError("/nowhere/config.json does not exist")) == 1
    assert capsys.readouterr() == ("", "dspark-serve: error: /nowhere/config.json does not exist\n")


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for title in cli.GROUPS.values():
        assert f"{title}:" in text
    for name, field in ServerConfig.model_fields.items():
        default = "" if field.default in (None, ()) else f" (default: {as_typed(field.default)})"
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
        f"  http://{shown}/ in a browser",
        f"  curl -N http://{shown}/generate -d '{body}'",
    ]
    last = cli.banner({"target": "T"}, host, port, needs_key=True).splitlines()[-1]
    assert last == f"  curl -N -H 'Authorization: Bearer KEY' http://{shown}/generate -d '{body}'"


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
