"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from dspark_core.grammar import Grammar
from dspark_core.settings import quote
from server.fields import MAX_TOP_LOGPROBS, GrammarSource
from server.openai.fields import REFUSED, OpenAIFields
from server.openai.logprobs import chat_logprobs
from server.openai.tools import ToolFormat, ToolStream, functions_of, spoken_arguments, tool_format
from server.openai.writer import OpenAIWriter
from server.protocol import Json
from server.request import Delta, RequestParams

_USE_TOOLS = "use tools"
_TEXT_ONLY = "the models served here write text"


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, str]] = {
        **REFUSED,
        "functions": _USE_TOOLS,
        "function_call": "use tool_choice",
        "audio": _TEXT_ONLY,
        "web_search_options": "the server reaches no network",
        "reasoning_effort": "use chat_template_kwargs, if the model's template knows any",
        "verbosity": "ask for it in a message",
        "chat_template": "the model's own is used",
        "documents": "write them into a message",
        "echo": "use /v1/completions",
        "continue_final_message": "use /v1/completions",
    }

    messages: Annotated[list[Any], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("found top_logprobs without logprobs, expected logprobs: true beside them")
        if not self.tools and (self.tool_choice == "required" or isinstance(self.tool_choice, dict)):
            raise ValueError(f"found tool_choice {quote(self.tool_choice)} without tools, expected tools beside it")
        constrained = self.structured_outputs or (self.response_format and self.response_format.type != "text")
        if constrained and self.tools and self.tool_choice != "none":
            raise ValueError("found tools and a format of the answer, expected one of them, or tool_choice none")
        return self

    def functions(self) -> list[Json]:
        """Tools that may be called."""
        return [] if self.tool_choice == "none" else functions_of(self.tools)

    def prompt_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt as token ids. Takes long for a long text: call it outside the event loop."""
        return tokenizer.encode_chat(
            spoken_arguments(self.messages),
            tools=self.tools if self.functions() else None,
            add_generation_prompt=self.add_generation_prompt,
            variables=self.chat_template_kwargs,
        )

    def tool_format(self, tokenizer: Tokenizer) -> ToolFormat | None:
        """How calls are spelled, if any may be made."""
        return tool_format(tokenizer.chat_template or "") if self.functions() else None

    def forced_call(self, calls: ToolFormat | None) -> GrammarSource | None:
        """The grammar of an answer that has to be a call."""
        functions = self.functions()
        if calls is None or self.tool_choice == "auto":
            return None
        if isinstance(self.tool_choice, dict):
            functions = [self._chosen(functions, self.tool_choice)]
        return calls.grammar(functions, many=self.tool_choice == "required" and self.parallel_tool_calls)

    def _chosen(self, functions: Sequence[Json], choice: Json) -> Json:
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) and choice.get("type") == "function" else None
        if name is None:
            expected = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
            raise RequestError(f"tool_choice: found {quote(choice)}, expected {expected}", "tool_choice")
        names = [function["name"] for function in functions]
        if name not in names:
            expected = f"a tool of the request: {', '.join(names)}"
            raise RequestError(f"tool_choice: found {quote(name)}, expected {expected}", "tool_choice")
        return functions[names.index(name)]

    def params(self, choice_index: int, grammar: Grammar | None) -> RequestParams:
        """What the engine is asked to do for one choice. Of two limits on its length the stricter one counts."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return self.request_params(
            choice_index,
            grammar,
            max_tokens=min(limits, default=None),
            logprobs=self.top_logprobs if self.logprobs else None,
        )


class ChatWriter(OpenAIWriter):
    """Words the answer.

    Args:
        request, request_id, model, prompt_tokens: as for every writer.
        tokenizer: for the text of single tokens.
        calls: how tool calls are spelled, if any may be made.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        model: str,
        prompt_tokens: int,
        tokenizer: Tokenizer,
        calls: ToolFormat | None,
    ) -> None:
        super().__init__(request, request_id, model, prompt_tokens)
        self.request, self.tokenizer, self.calls = request, tokenizer, calls
        self._names = [function["name"] for function in request.functions()]
        self._streams: dict[int, ToolStream] = {}
        self._begun: set[int] = set()

    def events(self, index: int, delta: Delta) -> Iterator[Json]:
        """The role, once; then text; then calls, each in one piece; the end in a chunk of its own."""
        self.count(index, delta)
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        text = delta.text
        found: list[Json] = []
        if self.calls:
            stream = self._streams.setdefault(index, ToolStream(self.calls, self._names))
            text = stream.feed(text)
            if delta.last:
                rest, found = stream.close()
                text, found = text + rest, self._permitted(found)
        if text or delta.logprobs:
            yield self._chunk(index, {"content": text}, self._logprobs([delta]))
        if found:
            yield self._chunk(index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(found)]})
        if delta.finish_reason:
            yield self._chunk(index, {}, finish_reason=_reason(delta, found))

    def choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        """A message, and why it ended."""
        self.count(index, deltas[-1])
        text = "".join(delta.text for delta in deltas)
        found: list[Json] = []
        if self.calls:
            text, found = self.calls.find(text, self._names)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if found:
            message |= {"content": text or None, "tool_calls": self._permitted(found)}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(deltas),
            "finish_reason": _reason(deltas[-1], found),
        }

    def _permitted(self, found: list[Json]) -> list[Json]:
        return found if self.request.parallel_tool_calls else found[:1]

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self.tokenizer, [entry for delta in deltas for entry in delta.logprobs or ()])

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.chunk(choice)


def _reason(last: Delta, calls: Sequence[Json]) -> str | None:
    """Calls are why an answer ended, unless it was cut: then there may have been more of them."""
    return "tool_calls" if calls and last.finish_reason == "stop" else last.finish_reason
