"""The OpenAI endpoints. Handlers are thin: parse, submit, answer."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request, Response

from server.answers import answer
from server.async_engine import AsyncEngine
from server.errors import json_response
from server.fields import read_fields
from server.generation import Generation, compile_grammar, open_streams
from server.logs import current_request_id, note_prompt
from server.openai.chat import ChatRequest, ChatWriter
from server.openai.completions import CompletionRequest, CompletionWriter
from server.openai.fields import check_model, parse_body
from server.openai.tokens import DetokenizeRequest, TokenizeRequest
from server.protocol import parse_object


def openai_routes(engine: AsyncEngine, model: str) -> APIRouter:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/tokenize`, `/detokenize`.

    Args:
        model: name of the one model.
    """
    router, tokenizer, created = APIRouter(), engine.tokenizer, int(time.time())

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = parse_body(CompletionRequest, await http.body(), model)
        given = request.prompts()
        note_prompt(http.scope, {"prompt": given})
        engine.check_queue(len(given) * request.n)  # a body holds millions of prompts: before any work on them
        ids = await asyncio.to_thread(lambda: [tokenizer.encode(p) if isinstance(p, str) else p for p in given])
        grammar = await compile_grammar(engine, request.grammar_source())
        places = [place for place in range(len(given)) for _ in range(request.n)]
        jobs = [(ids[place], request.params(choice, grammar)) for choice, place in enumerate(places)]
        streams = open_streams(engine, jobs)
        prompts = list(zip(given, ids, strict=True))
        writer = CompletionWriter(request, current_request_id(), model, tokenizer, prompts, streams)
        return await answer(http, Generation(streams, writer, writer.prompt_tokens), stream=request.stream)

    @router.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = parse_body(ChatRequest, await http.body(), model)
        note_prompt(http.scope, {"messages": request.messages})
        engine.check_queue(request.n)  # before any work
        prompt_ids = await asyncio.to_thread(request.prompt_tokens, tokenizer)
        calls = request.tool_format(tokenizer)
        grammar = await compile_grammar(engine, request.forced_call(calls) or request.grammar_source())
        jobs = [(prompt_ids, request.params(choice, grammar)) for choice in range(request.n)]
        writer = ChatWriter(request, current_request_id(), model, len(prompt_ids), tokenizer, calls)
        generation = Generation(open_streams(engine, jobs), writer, len(prompt_ids))
        return await answer(http, generation, stream=request.stream)

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(name, model)
        return json_response(card)

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = read_fields(TokenizeRequest, parse_object(await http.body()))
        return json_response(await asyncio.to_thread(request.answer, tokenizer, engine.max_model_len))

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = read_fields(DetokenizeRequest, parse_object(await http.body()))
        return json_response(await asyncio.to_thread(request.answer, tokenizer))

    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "dspark",
        "max_model_len": engine.max_model_len,
    }
    return router
