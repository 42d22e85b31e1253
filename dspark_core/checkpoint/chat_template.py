"""Chat templates: where they are found, what messages they accept, how they are rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark_core.errors import CheckpointError, RequestError
from dspark_core.keys import Keys

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


def find_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, Path] | None:
    """Return a model folder's chat template and the file it stands in, or None when there is none.

    A file `chat_template.jinja` wins over the key `chat_template` of tokenizer_config.json, and that over
    chat_template.json. Where several named templates are given, the one named "default" is taken.

    Raises:
        CheckpointError: the template is neither a text nor a list of named texts with a default.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8"), jinja
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{jinja}: not UTF-8 text: {error}") from error
    path, value = folder / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if value is None:
        path = folder / "chat_template.json"
        value = read_optional(path).get("chat_template")
    if value is None:
        return None
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(
            f"{path}: chat_template holds no template text; expected a string, or a list of "
            '{"name", "template"} with one named "default"'
        )
    return value, path


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} when there is no such file.

    Raises:
        CheckpointError: the file is anything but a JSON object.
    """
    return Keys.of_file(path).values if path.is_file() else {}


class ChatTemplate:
    """A compiled chat template.

    The template comes from whoever published the model, so it runs in Jinja's sandbox.
    """

    def __init__(self, source: str, path: Path, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: the template.
            path: the file it stands in, for messages.
            special_tokens: variables such as bos_token.

        Raises:
            CheckpointError: the template is not valid Jinja.
        """
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        self._environment = environment
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source, globals=dict(special_tokens))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{path}: chat template, line {error.lineno}: {error.message}") from error

    @property
    def takes_tools(self) -> bool:
        """Whether the template knows what to do with tools."""
        return "tools" in meta.find_undeclared_variables(self._environment.parse(self.source))

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of `messages`.

        Args:
            messages: as `normalise_messages` returns them.
            tools: functions that may be called, in OpenAI's notation.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: more of them, which only this model's template knows.

        Raises:
            RequestError: the template refuses the messages or fails on them.
        """
        known = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render({**(variables or {}), **known})
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        except Exception as error:  # a template is a program: messages it did not foresee can break it anyhow
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"the chat template fails on these messages: {what}", "messages") from error

    def normalise_messages(self, messages: Any) -> list[Message]:
        """Check `messages` and bring them into the form templates expect; the input is left as it is.

        Content becomes one string: text parts are joined, an absent content beside tool calls is empty. The
        role "developer" becomes "system" unless the template knows it. Other keys that are null, and tool calls of
        which there are none, are left out: templates ask whether they are there.

        Raises:
            RequestError: no messages, an unknown role, or content that is not text; it names the place.
        """
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list with at least one message", "messages")
        return [self._normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _normalise(self, message: Any, place: str) -> Message:
        if not isinstance(message, dict):
            raise RequestError(f"{place} must be an object, found {type(message).__name__}", "messages")
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{place}.role is {role!r}, expected one of {', '.join(ROLES)}", "messages")
        if role == "developer" and "developer" not in self.source:
            role = "system"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"{place}.content is missing", "messages")
        given = {
            key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])
        }
        return given | {"role": role, "content": _text_of(content, f"{place}.content")}


def _text_of(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        found = type(content).__name__
        raise RequestError(f"{place} must be text or a list of text parts, found {found}", "messages")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            expected = '{"type": "text", "text": "..."}'
            raise RequestError(f"{place}[{index}] is not a text part; expected {expected}", "messages")
        texts.append(part["text"])
    return "".join(texts)


_GENERATION = {"generation"}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is its content."""

    tags = _GENERATION

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes characters of HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
