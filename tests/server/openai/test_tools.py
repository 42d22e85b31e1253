"""Tools: forced calls through the engine, calls found in what a model says, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.openai.tools import HERMES, LLAMA, ToolFormat, ToolStream, spoken_arguments, tool_format
from server.request import Delta, RequestParams
from tests.server.engines import make_engine, tiny_draft, tiny_target
from tests.server.http_util import ByteTokenizer, FakeEngine, delta, make_app, server_of
from tests.server.openai.conftest import MODEL
from tests.tiny import EOS_ID, tiny_target_folder, write_json

HELLO: Any = [{"role": "user", "content": "Hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}  # no arguments
TOOLS: Any = [WEATHER, TIME]
HERMES_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}<|end|>{% endfor %}"
)
LLAMA_TEMPLATE = HERMES_TEMPLATE.replace("<tool_call>", '{"name", "parameters"} ipython')


def tokenizer_with(template: str, folder: Path) -> Tokenizer:
    path = tiny_target_folder(folder)
    config = json.loads((path / "tokenizer_config.json").read_text())
    write_json(path / "tokenizer_config.json", {**config, "chat_template": template})
    return Tokenizer.from_folder(path)


@pytest.fixture(scope="module", params=[HERMES_TEMPLATE, LLAMA_TEMPLATE], ids=["hermes", "llama"])
def tooled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A client of a tiny engine whose template takes tools."""
    engine = make_engine(tiny_draft("vanilla", 5, agrees=True), eos=[EOS_ID])
    engine.tokenizer = tokenizer_with(request.param, tmp_path_factory.mktemp("model"))
    engine.info["target"] = "tiny-target"
    app = create_app(AsyncEngine(engine), ServerConfig(served_model_name=MODEL))
    with server_of(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def calls_of(answer: Any, stream: bool) -> tuple[str | None, list[tuple[str, str]], str]:
    """Text, calls and finish_reason of the only choice of an answer."""
    if not stream:
        (choice,) = answer.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return choice.message.content, calls, choice.finish_reason
    parts = [chunk.choices[0] for chunk in answer]
    text = "".join(part.delta.content or "" for part in parts)
    calls = [(c.function.name, c.function.arguments) for part in parts for c in part.delta.tool_calls or ()]
    return text or None, calls, parts[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_keeps_the_schema(tooled: openai.OpenAI, choice: Any, stream: bool) -> None:
    body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "seed": 4}
    answer: Any = tooled.chat.completions.create(**body, parallel_tool_calls=False, stream=stream, model=MODEL)
    text, calls, reason = calls_of(answer, stream)
    assert (text, reason, len(calls)) == (None, "tool_calls", 1)
    name, arguments = calls[0]
    if isinstance(choice, dict) or name == "weather":
        assert name == "weather"
        assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    else:
        assert (name, json.loads(arguments)) == ("time", {})


def test_an_earlier_call_reaches_the_template_as_an_object(tooled: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with_city = tooled.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=1, model=MODEL).usage
    call["function"] = {"name": "weather", "arguments": "{}"}
    without = tooled.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=1, model=MODEL).usage
    assert with_city is not None
    assert without is not None
    assert with_city.prompt_tokens == without.prompt_tokens + 4


def test_no_tools_reach_the_model_when_none_may_be_called(tooled: openai.OpenAI) -> None:
    def prompt_tokens(**body: Any) -> int:
        usage = tooled.chat.completions.create(messages=HELLO, max_tokens=1, model=MODEL, **body).usage
        assert usage is not None
        return usage.prompt_tokens

    assert prompt_tokens(tools=TOOLS, tool_choice="none") == prompt_tokens() < prompt_tokens(tools=TOOLS)


class ToolTokenizer(ByteTokenizer):
    """Bytes, and a template that asks for calls in Hermes' form."""

    chat_template = "<tool_call>"

    def encode_chat(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        return super().encode_chat(messages)


def says(text: str, *, pieces: int = 3) -> Any:
    """A script whose model says `text`, some characters at a time."""

    async def script(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
        for start in range(0, len(text), pieces):
            yield delta(text[start : start + pieces])
        yield delta("", finish_reason="stop", completion_tokens=len(text))

    return script


ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOON = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "text", "calls", "reason"),
    [
        (ROME, None, [("weather", {"city": "Rome"})], "tool_calls"),
        (f"Let me see. {ROME}\n{NOON}", "Let me see.", [("weather", {"city": "Rome"}), ("time", {})], "tool_calls"),
        ("Sunny, <i>I think</i>", "Sunny, <i>I think</i>", [], "stop"),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", [], "stop"),
        (NOON.replace("time", "unknown"), NOON.replace("time", "unknown"), [], "stop"),
        ("half <tool_call>\n{", "half <tool_call>\n{", [], "stop"),
    ],
)
def test_calls_are_found_in_what_a_model_says(
    said: str, text: str | None, calls: Any, reason: str, stream: bool
) -> None:
    app = make_app(FakeEngine(says(said), ToolTokenizer()), served_model_name=MODEL)
    with server_of(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer: Any = client.chat.completions.create(messages=HELLO, tools=TOOLS, stream=stream, model=MODEL)
        found = calls_of(answer, stream)
    assert (found[0].strip() if found[0] else found[0]) == text
    assert [(name, json.loads(arguments)) for name, arguments in found[1]] == calls
    assert found[2] == reason


def test_one_call_where_only_one_is_wanted() -> None:
    app = make_app(FakeEngine(says(ROME + NOON), ToolTokenizer()), served_model_name=MODEL)
    with server_of(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(messages=HELLO, tools=TOOLS, parallel_tool_calls=False, model=MODEL)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or () if call.type == "function"] == [
        "weather"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_says_so_whatever_it_called(stream: bool) -> None:
    async def script(prompt_ids: list[int], params: RequestParams) -> AsyncIterator[Delta]:
        yield delta(f"{NOON}<tool_call>{{")
        yield delta("", finish_reason="length")

    app = make_app(FakeEngine(script, ToolTokenizer()), served_model_name=MODEL)
    with server_of(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer: Any = client.chat.completions.create(messages=HELLO, tools=TOOLS, stream=stream, model=MODEL)
        _, calls, reason = calls_of(answer, stream)
    assert ([name for name, _ in calls], reason) == (["time"], "length")


BARE = '{"name": "weather", "parameters": {"city": "Oslo"}}'


@given(
    st.sampled_from(
        [
            (HERMES, f"a <too {ROME} b {NOON}"),
            (HERMES, "a < b <tool"),
            (LLAMA, BARE),
            (LLAMA, f" \n{BARE}"),
            (LLAMA, "no {"),
        ]
    ),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_a_stream_in_any_pieces_finds_what_the_whole_text_holds(case: tuple[ToolFormat, str], sizes: list[int]) -> None:
    known, text = case
    names = ["weather", "time"]
    stream, said, rest = ToolStream(known, names), "", text
    while rest:
        for size in sizes:
            said += stream.feed(rest[:size])
            rest = rest[size:]
    left, calls = stream.close()
    whole, expected = known.find(text, names)
    assert "".join((said + left).split()) == "".join(whole.split())
    assert [call["function"] for call in calls] == [call["function"] for call in expected]


def test_a_text_that_only_opens_calls_is_searched_once() -> None:
    """Its square would take hours."""
    text = "<tool_call>" * 300_000
    assert HERMES.find(text, ["time"]) == (text, [])
    assert [call["function"]["name"] for call in HERMES.find(NOON + text, ["time"])[1]] == ["time"]


@pytest.mark.parametrize("known", [HERMES, LLAMA])
def test_a_call_that_is_nested_too_deeply_is_text(known: ToolFormat) -> None:
    text = known.opening + "[" * 100_000 + known.closing
    assert known.find(text, ["time"]) == (text, [])


@pytest.mark.parametrize("arguments", ["{oops", "[" * 100_000])
def test_arguments_that_are_no_json_stay_as_they_are(arguments: str) -> None:
    call = {"function": {"name": "a", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call, "odd"]}
    assert spoken_arguments([message, "odd"]) == [message, "odd"]


def test_the_form_of_calls_is_known_by_the_template() -> None:
    assert tool_format(HERMES_TEMPLATE) is HERMES
    assert tool_format(LLAMA_TEMPLATE) is LLAMA
    with pytest.raises(RequestError, match="expected the Hermes or Llama 3 form"):
        tool_format("{{ tools }}")


def test_a_template_without_tools_refuses_them() -> None:
    tokenizer = tiny_target().tokenizer
    with pytest.raises(RequestError, match="this model's chat template knows none"):
        tokenizer.encode_chat(HELLO, tools=TOOLS)
