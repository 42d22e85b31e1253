"""`dspark-chat`: talk to a running dspark server, and see what became of every token's draft."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

import httpx
from pydantic import field_validator
from rich.console import Console

from dspark_core.program import fail
from dspark_core.settings import Parser, Settings, UsageError, flag, public_fields, setting
from dspark_core.sources import Layers, read_environment, variable
from server.chat.answer import printable
from server.chat.client import ChatError, Client
from server.chat.session import DraftUse, Session

PROGRAM = "dspark-chat"
GROUPS = {"server": "who is asked", "answer": "how it answers", "terminal": "the terminal"}
EPILOG = (
    "What comes through a pipe is one message: the answer goes to the standard output, the rest to the error output. "
    "The exit code is 0, 1 when the server cannot be asked or fails, 2 for wrong usage, 130 when interrupted."
)
_FIELDS = ("temperature", "max_tokens", "seed")


class ChatConfig(Settings):
    """Everything `dspark-chat` can be told. What is unset is left to the server."""

    url: str = setting("http://localhost:8000", "server", "the server's address")
    api_key: str | None = setting(
        None, "server", "key, if the server asks for one; unset: the variable DSPARK_API_KEY", min_length=1, repr=False
    )
    system: str | None = setting(None, "answer", "system prompt", min_length=1)
    temperature: float | None = setting(None, "answer", "0: always the most likely token; unset: the server's", ge=0)
    max_tokens: int | None = setting(None, "answer", "longest answer; unset: as the context allows", ge=1)
    seed: int | None = setting(None, "answer", "same seed, same question: same answer", ge=0, le=2**63 - 1)
    draft: DraftUse = setting(
        "auto", "answer", "auto: as far as it pays; full: whole blocks whatever it costs; off: none"
    )
    no_color: bool = setting(False, "terminal", "no colours; NO_COLOR says the same, and a file never gets any")

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        with contextlib.suppress(httpx.InvalidURL):
            if (url := httpx.URL(value)).scheme in ("http", "https") and url.host:
                return value
        raise ValueError(f'found "{value}", expected http://HOST:PORT')


def build_parser() -> Parser:
    """One flag per field of ChatConfig."""
    description = "Talk to a dspark server; every token's colour says what became of its draft."
    parser = Parser(PROGRAM, description=description, epilog=EPILOG)
    parser.add_settings(ChatConfig, GROUPS)
    return parser


def parse_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ChatConfig:
    """Settings from the command line; the key also from the variable. UsageError names what is wrong."""
    layers = Layers()
    # A server takes several keys from this variable; one is enough to ask it.
    keys = {name: text.split(",")[0] for name, text in read_environment(["api_key"], environ).items() if text}
    layers.add(keys, variable)
    layers.add(build_parser().parse_known(argv, public_fields(ChatConfig)), flag)
    return layers.build(ChatConfig)


def make_session(config: ChatConfig) -> Session:
    """A conversation that has not begun."""
    fields = {name: value for name in _FIELDS if (value := getattr(config, name)) is not None}
    # None: as the terminal and NO_COLOR say. Without colour the other attributes remain.
    no_color = config.no_color or None
    consoles = (Console(no_color=no_color), Console(no_color=no_color, stderr=True))
    session = Session(Client(config.url, config.api_key), fields, config.system, *consoles)
    session.draft = config.draft
    return session


def converse(session: Session) -> int:
    """Ask line by line until the user leaves; the exit code."""
    with contextlib.suppress(ImportError):
        import_module("readline")  # input() then edits lines and remembers them
    session.note(f"{printable(session.client.model())} at {session.client.url}; /help lists the commands")
    session.notes.print(session.legend())
    interrupted = False
    while True:
        try:
            line = input("> ")
            if line.startswith("/"):
                if not session.command(line):
                    return 0
            elif line.strip():
                session.ask(line)
            interrupted = False
        except EOFError:
            session.notes.out()
            return 0
        except KeyboardInterrupt:
            if interrupted:
                return 0
            interrupted = True
            session.note("stopped; Ctrl-C once more, or Ctrl-D, leaves")
        except ChatError as error:
            session.notes.out(f"error: {printable(str(error))}", style="red", highlight=False)


def ask_once(session: Session) -> int:
    """The whole standard input as one message; the exit code."""
    text = sys.stdin.read().strip()
    if not text:
        return fail(PROGRAM, "the standard input is empty, expected a message", 2)
    session.ask(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code: 0 done, 1 the server cannot be asked, 2 wrong usage, 130 interrupted."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        return fail(PROGRAM, str(error), 2)
    session = make_session(config)
    try:
        with contextlib.closing(session.client):
            return converse(session) if sys.stdin.isatty() else ask_once(session)
    except ChatError as error:
        return fail(PROGRAM, printable(str(error)), 1)
    except KeyboardInterrupt:
        return fail(PROGRAM, "interrupted", 130)


if __name__ == "__main__":
    sys.exit(main())
