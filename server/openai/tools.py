"""Tools: how each family of models spells a call, how an answer is held to that, and how calls are found in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_core.errors import RequestError
from dspark_core.grammar import JSON_BLANKS
from dspark_core.settings import quote
from server.fields import GrammarSource
from server.protocol import Json


@dataclass(frozen=True)
class ToolFormat:
    """How a family spells a call: an object with a name and arguments, between two markers.

    Attributes:
        opening, closing: text around the object; none for a family that answers with the bare object.
        arguments: key of the arguments.
    """

    opening: str
    closing: str
    arguments: str

    def grammar(self, tools: Sequence[Json], *, many: bool) -> GrammarSource:
        """One call of one of `tools`, or `many` of them: in llguidance's Lark notation."""
        rules = [f"tool{place}: %json {json.dumps(self._schema(tool))}" for place, tool in enumerate(tools)]
        names = " | ".join(f"tool{place}" for place in range(len(tools)))
        opening, closing = (f"{json.dumps(text)} " if text else "" for text in (self.opening, self.closing))
        more = ' ("\\n" call)*' if many and self.opening else ""
        text = "\n".join([f"start: call{more}", f"call: {opening}({names}) {closing}", *rules])
        return GrammarSource("grammar", text, "tools")

    def _schema(self, tool: Json) -> Json:
        arguments = tool.get("parameters") or {"type": "object", "additionalProperties": False}
        return {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
            "x-guidance": {"whitespace_pattern": JSON_BLANKS},
            **{key: arguments[key] for key in ("$defs", "definitions") if key in arguments},
        }

    def find(self, text: str, names: Sequence[str]) -> tuple[str, list[Json]]:
        """What an answer says, and the calls in it. A text that is no whole call of a known tool is left as it is."""
        if not self.opening:
            call = self._call(text.strip(), names)
            return ("", [call]) if call else (text, [])
        opening, closing = self.opening.strip(), self.closing.strip()
        calls, said, rest = list[Json](), list[str](), 0
        # Not by a regular expression: it would take the square of a text that only opens calls.
        while (start := text.find(opening, rest)) >= 0 and (end := text.find(closing, start)) >= 0:
            call = self._call(text[start + len(opening) : end].strip(), names)
            end += len(closing)
            said.append(text[rest : start if call else end])
            calls += [call] if call else []
            rest = end
        return ("".join([*said, text[rest:]]).strip() if calls else text), calls

    def _call(self, text: str, names: Sequence[str]) -> Json | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in names:
            return None
        arguments = found.get(self.arguments, {})
        if not isinstance(arguments, dict):
            return None
        function = {"name": found["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template asks its model for; RequestError for one that is not known here."""
    if "<tool_call>" in template:
        return HERMES
    if '"parameters"' in template and "ipython" in template:
        return LLAMA
    message = "tools: this model's chat template asks for calls of an unknown form, expected the Hermes or Llama 3 form"
    raise RequestError(message, "tools")


def functions_of(tools: Sequence[Any]) -> list[Json]:
    """The functions of a request's `tools`; RequestError names the one at fault."""
    functions = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"type": "function", "function": {"name": ...}}'
            raise RequestError(f"tools[{place}]: found {quote(tool)}, expected {expected}", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestError(f"tools[{place}].function.parameters: expected a JSON schema", "tools")
        functions.append(function)
    return functions


def spoken_arguments(messages: Sequence[Any]) -> list[Any]:
    """Messages in which earlier calls have their arguments as objects, as templates expect, not as OpenAI's text."""

    def opened(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call  # what a model once got wrong is shown to it as it was
        return {**call, "function": {**function, "arguments": arguments}}

    def one(message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        return {**message, "tool_calls": [opened(call) for call in calls]} if isinstance(calls, list) else message

    return [one(message) for message in messages]


class ToolStream:
    """Tells apart what an answer says and what it calls, while it comes.

    Args:
        tool_format: of the model.
        names: of the tools that may be called.
    """

    def __init__(self, tool_format: ToolFormat, names: Sequence[str]) -> None:
        self.format, self.names = tool_format, names
        self._held, self._calling, self._speaking = "", False, False

    def feed(self, text: str) -> str:
        """Text that is surely said; what may yet become a call is kept back."""
        self._held += text
        if self._calling:
            return ""
        place = self._start_of_call()
        said, self._held = self._held[:place], self._held[place:]
        return said

    def close(self) -> tuple[str, list[Json]]:
        """What is left to say, and the calls."""
        return self.format.find(self._held, self.names)

    def _start_of_call(self) -> int:
        """Place in what is held from which on it is a call, or may be one."""
        if not self.format.opening:  # the whole answer is a call, or none of it is
            begun = self._held.lstrip()
            self._speaking = self._speaking or (begun != "" and begun[0] != "{")
            return len(self._held) if self._speaking else 0
        marker = self.format.opening.strip()
        place = self._held.find(marker)
        self._calling = place >= 0
        if self._calling:
            return place
        sizes = range(min(len(marker) - 1, len(self._held)), 0, -1)
        return len(self._held) - next((size for size in sizes if marker.startswith(self._held[-size:])), 0)
