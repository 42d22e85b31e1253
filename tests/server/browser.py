"""A headless Chromium, and a server with a tiny model for it that can be slowed, stopped and started again."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from server import cli
from server.app import create_app
from server.async_engine import AsyncEngine
from server.config import ServerConfig
from server.engine import Engine
from tests.server.engines import make_engine, tiny_draft
from tests.server.http_util import DEADLINE_S, eventually
from tests.server.policies import Lengths

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
# As on a machine of CI: no sandbox for root, no GPU, and nothing that Chromium asks of its makers.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NETWORK_FAILED = "Failed to load resource"  # what Chromium itself says of a server that is gone or refuses
# WCAG's contrast of every colour of text against every ground that text lies on.
CONTRASTS = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const rgb = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  };
  const light = (name) => rgb(name)
    .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const found = {};
  for (const ground of ["ground", "raised", "sunken"])
    for (const ink of ["ink", "faint", "accepted", "corrected", "bonus", "edge", "plain"])
      found[`${ink} on ${ground}`] = contrast(ink, ground);
  probe.remove();
  return found;
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (Debian's package chromium has one)")
    playwright.expect.set_options(timeout=1000 * DEADLINE_S)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Site:
    """The real application around a tiny target and a draft of 4 tokens, right about every second time; 3 are verified.

    Attributes:
        pause_s: how long every step of the engine takes at least, in seconds.
        most_running: requests that the engine has had at the same time.
    """

    def __init__(self, **config: Any) -> None:
        self.config = ServerConfig(**config)
        self.pause_s, self.most_running = 0.0, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def running(self) -> int:
        return self.async_engine.num_running

    def start(self) -> None:
        """Serve, on the same port every time."""
        engine = make_engine(tiny_draft("vanilla", 4, agrees=True))
        engine.info["target"] = "tiny/tiny-target (qwen3, 4 layers)"
        engine.policy = Lengths(admit=lambda slots, _: [min(count, 3) for count in slots])
        self._slow(engine)
        self.async_engine = AsyncEngine(engine)
        app = create_app(self.async_engine, self.config)
        self.server = cli.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        sock = cli.listen("127.0.0.1", self.port)
        self.thread = threading.Thread(target=self.server.run, args=([sock],))
        self.thread.start()
        eventually(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the server did not stop"

    def _slow(self, engine: Engine) -> None:
        step = engine.step

        def slow_step() -> Any:
            time.sleep(self.pause_s)
            self.most_running = max(self.most_running, len(engine.scheduler.running) + len(engine.scheduler.waiting))
            return step()

        engine.step = slow_step  # type: ignore[method-assign]


@contextmanager
def serving(**config: Any) -> Iterator[Site]:
    """A started site, stopped at the end."""
    site = Site(**config)
    site.start()
    try:
        yield site
    finally:
        site.stop()


@contextmanager
def open_page(browser: Any, site: Site, **context: Any) -> Iterator[Any]:
    """The playground, loaded. At the end nothing may have been asked of others, nor an error be on the console."""
    opened = browser.new_context(viewport={"width": 1100, "height": 700}, reduced_motion="reduce", **context)
    asked: list[str] = []
    errors: list[str] = []
    try:
        page = opened.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(site.url)
        page.locator(".lamp.on").wait_for()
        set_field(page, "max_tokens", 40)
        page.locator("#prompt").focus()
        yield page
    finally:
        opened.close()
    assert {url for url in asked if not url.startswith(site.url)} == set()
    assert [text for text in errors if not text.startswith(NETWORK_FAILED)] == []


def set_field(page: Any, name: str, value: float) -> None:
    """Type a setting."""
    if not page.locator("#settings").is_visible():
        page.locator("summary").click()
    page.locator(f"[name={name}]").fill(str(value))


def send(page: Any, text: str) -> None:
    """Ask, and wait for the end."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    finish(page)


def finish(page: Any) -> None:
    """Wait for the end of the answer."""
    page.locator(".turn").last.locator(".stats:not(:empty)").last.wait_for()
    page.locator("#send", has_text="Send").wait_for()


def see(locator: Any) -> Any:
    """Assertions that wait."""
    from playwright.sync_api import expect

    return expect(locator)


def ask(site: Site, question: str, speculative: bool | str = True) -> Any:
    """What a page is told, asked without a browser."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0, "detail": True}
    body["speculative"] = speculative
    return httpx.post(f"{site.url}generate", json=body).raise_for_status().json()
