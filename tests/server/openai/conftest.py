"""A running server around a tiny engine, and the official client that talks to it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.engine import Engine
from tests.server.engines import make_engine, tiny_draft
from tests.server.http_util import server_of
from tests.tiny import EOS_ID

MODEL = "tiny"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """With a draft that is right about every second time."""
    engine = make_engine(tiny_draft("vanilla", 5, agrees=True), eos=[EOS_ID], num_tokens=8192)
    engine.info["target"] = "tiny-target"
    return engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with server_of(create_app(AsyncEngine(engine, 64), ServerConfig(served_model_name=MODEL))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
