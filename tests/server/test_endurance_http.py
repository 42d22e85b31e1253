"""Many clients of a real server on loopback, of which some hang up in the middle: nothing is left of any.

Ten thousand: `python -m tests.server.test_endurance_http --requests 10000`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable

import httpx

from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from tests.server.engines import check_idle
from tests.server.http_util import DEADLINE_S, eventually, server_of
from tests.server.test_endurance import LENGTHS, measure_growth, small_engine

CLIENTS = 12


class Clients:
    """So many at once, each with one request after the other.

    Attributes:
        ended: how many requests ended in which way.
    """

    def __init__(self, url: str, vocabulary: int, seed: int = 0) -> None:
        self.url, self.vocabulary, self.draw = url, vocabulary, random.Random(seed)
        self.ended: Counter[str] = Counter()

    async def run(self, count: int, on_end: Callable[[int], None] | None = None) -> None:
        left = iter(range(count))
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as client:

            async def one_after_the_other() -> None:
                for _ in left:
                    self.ended[await self._request(client)] += 1
                    if on_end:
                        on_end(self.ended.total())

            await asyncio.gather(*(one_after_the_other() for _ in range(CLIENTS)))

    async def _request(self, client: httpx.AsyncClient) -> str:
        """One request of any kind. Returns what became of it."""
        draw, streams = self.draw, self.draw.random() < 0.7
        path, ids = draw.choice([("/generate", "prompt_ids"), ("/v1/completions", "prompt")])
        body = {
            ids: [draw.randrange(self.vocabulary) for _ in range(draw.choice(LENGTHS))],
            "max_tokens": draw.randint(1, 38),
            "temperature": draw.choice([0.0, 1.0]),
            "stream": streams,
            "n": draw.choice([1, 1, 2]),
        }
        patience = draw.choice([None, None, None, 0, 1, 4])
        try:
            # Who does not stream hangs up after some milliseconds, others after some events.
            timeout = None if streams or patience is None else patience / 1000
            async with asyncio.timeout(timeout), client.stream("POST", path, json=body) as response:
                events = 0
                async for line in response.aiter_lines():
                    events += line.startswith("data: ")
                    if streams and patience is not None and events > patience:
                        return "hung up on a stream"
                assert response.status_code == 200, line
                assert not streams or line == "" or "[DONE]" in line
                return "streamed" if streams else "answered"
        except TimeoutError:
            return "hung up"


def endure(count: int, on_end: Callable[[int], None] | None = None) -> Counter[str]:
    """Run so many requests; afterwards the engine holds none, and lives."""
    engine = small_engine()
    with server_of(create_app(AsyncEngine(engine), ServerConfig(served_model_name="tiny"))) as url:
        clients = Clients(url, engine.vocab_size)
        asyncio.run(clients.run(count, on_end))
        eventually(lambda: not engine.has_work)
        health = httpx.get(f"{url}/health")
        assert health.json() == {"status": "ok", "running": 0, "waiting": 0}
    check_idle(engine)
    return clients.ended


def test_nothing_is_left_of_clients_that_hang_up() -> None:
    """Cases H1, H4 and P1."""
    ended = endure(150)
    assert ended.total() == 150
    assert min(ended[way] for way in ("streamed", "answered", "hung up", "hung up on a stream")) > 3, ended


if __name__ == "__main__":
    sys.exit(measure_growth(lambda count, on_end: str(dict(endure(count, on_end))), __doc__))
