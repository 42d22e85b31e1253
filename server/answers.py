"""The last step of every handler that generates."""

from __future__ import annotations

import asyncio
from contextlib import closing

from fastapi import Request, Response

from server.errors import json_response
from server.generation import Generation
from server.logs import note
from server.streaming import EventStream, while_connected


async def answer(http: Request, generation: Generation, *, stream: bool) -> Response:
    """Send a generation as a stream, or as one object when it is whole."""
    if stream:
        return EventStream(generation)
    with closing(generation):
        try:
            content = await while_connected(http.receive, generation.reply())
        finally:  # the log tells how far it came, too
            note(http.scope, **generation.figures())
    return await asyncio.to_thread(json_response, content)
