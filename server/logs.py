"""The log: its formats, the ids of requests, and one line for every request when it ends.

A handler that knows more about its request than method, path and status says so with `note`.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_core.program import LOG_FORMAT

REQUEST_ID = "X-Request-Id"
_SANE_ID = re.compile(rb"[ -~]{1,128}")
_NOTES = "dspark.notes"
# nginx's number for a client that went before it was answered.
CLIENT_CLOSED_REQUEST = 499

log = logging.getLogger(__name__)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True)
class _Notes:
    prompts: bool
    fields: dict[str, Any] = field(default_factory=dict)


def current_request_id() -> str:
    """Id of the HTTP request that is being served."""
    return _request_id.get() or uuid.uuid4().hex


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the line that is logged when the request of this ASGI scope ends.

    Known names: prompt_tokens, completion_tokens, finish_reason, acceptance_length (tokens a round, the bonus token
    included), error (the code of what went wrong). Fields that are None are left out; a later value replaces an earlier
    one. Nothing that a user wrote belongs here: see `note_prompt`.
    """
    if isinstance(notes := scope.get(_NOTES), _Notes):
        notes.fields.update({name: value for name, value in fields.items() if value is not None})


def note_prompt(scope: Scope, prompt: Any) -> None:
    """What the request asks, as it was sent. It is logged with --log-prompts only."""
    if isinstance(notes := scope.get(_NOTES), _Notes) and notes.prompts:
        notes.fields["prompt"] = prompt


class RequestLog:
    """ASGI middleware: gives every request its id, returns it, and logs the request when it ends.

    Args:
        prompts: whether the lines hold what requests asked.
    """

    def __init__(self, app: ASGIApp, *, prompts: bool = False) -> None:
        self.app, self.prompts = app, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, status, begun = _id_of(scope), CLIENT_CLOSED_REQUEST, time.monotonic()
        scope[_NOTES] = notes = _Notes(self.prompts)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (REQUEST_ID.lower().encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        token = _request_id.set(request_id)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            milliseconds = round((time.monotonic() - begun) * 1e3, 1)
            _log_request(scope, {"status": status, "milliseconds": milliseconds, **notes.fields})
            _request_id.reset(token)


def _id_of(scope: Scope) -> str:
    """The client's id if it can be logged and sent back as it is, else a new one."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID.lower().encode()), b"")
    return given.decode("ascii") if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _log_request(scope: Scope, fields: dict[str, Any]) -> None:
    path = quote(scope["path"])  # no line break, and nothing of a query: it could hold anything
    fields = {"method": scope["method"], "path": path, **fields}
    log.info("%s %s", scope["method"], path, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """One line of text; fields follow as name=value."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end; a traceback follows in lines of its own."""
        shown = {k: v for k, v in _fields(record).items() if k not in ("method", "path")}
        record = copy.copy(record)
        record.msg, record.args = record.getMessage() + "".join(f" {k}={_plain(v)}" for k, v in shown.items()), None
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=True, default=repr)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    request_id = _request_id.get()
    return ({"request_id": request_id} if request_id else {}) | getattr(record, "fields", {})


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if re.fullmatch(r"[!#-~]+", text) else json.dumps(text)


def setup(level: str, kind: Literal["text", "json"]) -> None:
    """Log everything, uvicorn's messages too, to the error output.

    Args:
        level: the least severe level that is logged, such as "info".
        kind: the format of the lines.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
