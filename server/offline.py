"""The engine without a server: many prompts in, finished requests out, as many at once as the engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from dspark_core.errors import RunError
from server.engine import Engine
from server.request import Request, RequestParams

Tag = TypeVar("Tag")
Job = tuple[Tag, list[int], RequestParams]


class GenerationError(RunError):
    """A request that the engine had accepted ended with an error."""


def complete(engine: Engine, jobs: Iterable[Job[Tag]]) -> Iterator[tuple[Tag, Request]]:
    """Run jobs (a tag of the caller's, prompt ids, parameters); yields tag and request in the order they finish.

    Jobs are drawn from the iterable only as places become free. On an early end the engine is left empty.

    Raises:
        RequestError: a job does not fit the model.
        GenerationError: a request ended with an error.
    """
    source, tags = iter(jobs), dict[int, Tag]()
    live: list[Request] = []
    try:
        while True:
            while len(live) < engine.max_num_seqs and (job := next(source, None)) is not None:
                tag, prompt_ids, params = job
                request = engine.make_request(prompt_ids, params)
                tags[id(request)] = tag
                live.append(request)
                engine.add(request)
            if not live:
                return
            engine.step()
            done = [request for request in live if request.finished]
            live = [request for request in live if not request.finished]
            for request in done:
                if request.error:
                    raise GenerationError(request.error)
                yield tags.pop(id(request)), request
    finally:
        for request in live:
            engine.abort(request)
