"""`dspark-chat`: what it prints and how it ends, around a real server with a tiny model."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from server.chat import cli
from server.chat.answer import Answer, printable
from server.chat.client import ChatError, Client
from server.chat.session import Session
from tests.server.browser import ROOT, Site, ask, serving
from tests.server.http_util import DEADLINE_S, FakeEngine, eventually, make_app, server_of

QUESTION = "Tell me something"
GREEDY = ["--temperature", "0", "--max-tokens", "40"]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


def run(monkeypatch: pytest.MonkeyPatch, url: str, text: str, *flags: str) -> int:
    """`dspark-chat` with a text on its standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli.main(["--url", url, *flags])


def test_a_pipe_is_one_message_and_gets_the_answer_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = ask(site, QUESTION)
    assert run(monkeypatch, site.url, f"{QUESTION}\n", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert out == f"{printable(reply['text'])}\n"
    spent = reply["speculation"]
    assert err.startswith("40 tokens · ")
    assert f"acceptance length {spent['acceptance_length']:.2f} · " in err
    assert f"{spent['accepted']} accepted / {spent['verified']} verified / {spent['drafted']} drafted" in err
    assert err.endswith(" · ended at max tokens\n")


def test_plain_says_the_same_without_a_draft(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, site.url, QUESTION, *GREEDY) == 0
    with_draft = capsys.readouterr().out
    assert run(monkeypatch, site.url, QUESTION, *GREEDY, "--draft", "off") == 0
    out, err = capsys.readouterr()
    assert out == with_draft
    assert "nothing drafted" in err


@pytest.mark.parametrize("no_color", [False, True])
def test_tokens_look_like_what_became_of_them(site: Site, no_color: bool) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=no_color, width=20)
    with closing(Client(site.url)) as client:
        session = Session(client, {"temperature": 0, "max_tokens": 40}, None, out, out)
        session.ask(QUESTION)
        session.command("/draft off")
        session.ask(QUESTION)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[32m" in text) is not no_color, "accepted"
    assert ("\x1b[4m" if no_color else "\x1b[4;31m") in text, "corrected"
    assert "\x1b[2m" in text, "plain"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--url", "localhost:8000"], 2, '--url: found "localhost:8000", expected http://HOST:PORT'),
        (["--url", "http://a:b"], 2, '--url: found "http://a:b", expected http://HOST:PORT'),
        (["--temperature", "hot"], 2, '--temperature: found "hot", expected a valid number'),
        (["--tokens", "3"], 2, "unknown argument --tokens, expected"),
        (["--url", "http://127.0.0.1:9"], 1, "nothing answers at http://127.0.0.1:9 ("),
    ],
)
def test_what_cannot_be_done_is_one_line(
    flags: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert cli.main(flags) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dspark-chat: error: {message}")
    assert err.count("\n") == 1


def test_an_empty_pipe_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "http://127.0.0.1:9", " \n") == 2
    assert "the standard input is empty, expected a message" in capsys.readouterr().err


def test_a_refusal_is_told_in_the_servers_words(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, site.url, "hi", "--max-tokens", "10000") == 1
    assert "10000" in capsys.readouterr().err


def test_a_key_comes_from_the_flag_or_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.parse_config([], {"DSPARK_API_KEY": "one,two"}).api_key == "one"
    assert cli.parse_config(["--api-key", "three"], {"DSPARK_API_KEY": "one"}).api_key == "three"
    with server_of(make_app(FakeEngine(), api_key=("secret",))) as url:
        assert run(monkeypatch, url, "hi", "--max-tokens", "10") == 1
        assert "give it with --api-key or in DSPARK_API_KEY" in capsys.readouterr().err
        assert run(monkeypatch, url, "hi", "--max-tokens", "10", "--api-key", "secret") == 0


def test_a_conversation_remembers_until_it_is_reset() -> None:
    engine, notes = FakeEngine(), Console(file=io.StringIO())
    with server_of(make_app(engine)) as url, closing(Client(url)) as client:
        session = Session(client, {"max_tokens": 4}, "S", Console(file=io.StringIO()), notes)
        for line in ("a", "b"):
            session.ask(line)
        assert session.command("/reset")
        session.ask("c")
        with pytest.raises(ChatError):
            session.ask("d" * 100)
        assert [m["content"] for m in session.messages] == ["S", "c", "syst"], "a refused question is kept"
        assert session.command("/nonsense")
        assert not session.command("/exit")
    prompts = [bytes(ids).decode() for ids, _ in engine.submitted]
    assert prompts == [
        "system:S\nuser:a\n",
        "system:S\nuser:a\nassistant:syst\nuser:b\n",
        "system:S\nuser:c\n",
    ]
    assert "/nonsense is no command, expected /reset" in notes.file.getvalue()  # type: ignore[attr-defined]


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\tb\n\x1b[2J\x07\x9b1m\r") == "a\tb\n�[2J��1m�"


def test_a_text_cut_inside_a_token_is_shown_as_it_was_sent() -> None:
    token = {"token_id": 1, "text": "ab", "source": "accepted"}
    round_ = {"drafted": 1, "verified": 1, "accepted": 1, "draft": [], "tokens": [token, {**token, "source": "bonus"}]}
    answer = Answer()
    last = {"text": "aba", "token_ids": [1, 1], "rounds": [round_], "finish_reason": "stop"}
    assert list(answer.add(last)) == [("ab", "accepted"), ("a", "bonus"), ("", "")]
    rest = {"text": "�", "token_ids": [], "rounds": [], "finish_reason": "length"}
    assert list(answer.add(rest)) == [("�", "")]


def test_the_rate_leaves_out_the_first_event() -> None:
    times = iter([10.0, 10.5])
    answer = Answer(clock=lambda: next(times))
    list(answer.add({"text": "a", "token_ids": [1, 2, 3], "rounds": []}))
    assert answer.rate is None
    list(answer.add({"text": "b", "token_ids": [1, 2], "rounds": []}))
    assert answer.rate == 4.0


def test_it_needs_no_torch() -> None:
    code = "import sys, server.chat.cli; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=DEADLINE_S)


def test_ctrl_c_stops_the_answer_and_twice_leaves(site: Site) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "server.chat.cli", "--url", site.url]
    site.pause_s = 0.05
    with subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        try:
            read_until(controller, "> ")
            os.write(controller, b"hello\n")
            eventually(lambda: site.running == 1)
            process.send_signal(signal.SIGINT)
            assert "leaves" in read_until(controller, "> ")
            eventually(lambda: site.running == 0)
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            os.close(controller)
            site.pause_s = 0.0


def read_until(terminal: int, end: str) -> str:
    """What a program has written up to its next prompt."""
    text = ""
    while not text.endswith(end):
        text += os.read(terminal, 4096).decode(errors="replace")
    return text


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in cli.ChatConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert str(field.description) in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'data: {"text":"a","token_ids":[1],"rounds":[]}\n\n', "broke before the answer had ended"),
        (b'data: {"error":{"message":"out of memory"}}\n\ndata: [DONE]\n\n', "out of memory"),
        (b"data: <html>\n\n", "no dspark server"),
    ],
)
def test_a_stream_that_goes_wrong_is_told(content: bytes, message: str) -> None:
    client = Client("http://server")
    client.close()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    client._http = httpx.Client(base_url=client.url, transport=transport)
    with closing(client), pytest.raises(ChatError, match=message):
        list(client.generate({"prompt": "a"}))
