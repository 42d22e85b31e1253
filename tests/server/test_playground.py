"""The playground: its files, and what a person sees and does in a real browser around a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from server.playground.routes import load_assets
from tests.server.browser import CONTRASTS, Site, ask, chromium, finish, open_page, see, send, serving, set_field
from tests.server.http_util import FakeEngine, client_of, eventually, make_app

browser_test = pytest.mark.browser
QUESTION = "Tell me something"
SOURCES = ("accepted", "corrected", "bonus", "plain")


async def test_every_file_has_its_type_and_a_strict_policy() -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    async with client_of(make_app(FakeEngine(), api_key=("secret",))) as client:
        page = await client.get("/")
        names = re.findall(r'(?:src|href)="playground/([^"]+)"', page.text)
        modules = [name for text in load_assets().values() for name in re.findall(rb'from "\./(.+?)"', text.content)]
        assert {*names, *(name.decode() for name in modules)} == load_assets().keys() - {"index.html"}
        for path in ("/", *(f"/playground/{name}" for name in load_assets())):
            response = await client.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(
                types[path.rpartition(".")[2] if path != "/" else "html"]
            )
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
            assert (await client.head(path)).status_code == 200
            again = await client.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/playground/routes.py")).status_code == 404


def test_no_file_names_another_place() -> None:
    addresses = [
        a for asset in load_assets().values() for a in re.findall(rb"(?:https?:)?//[\w.]+\.\w+", asset.content)
    ]
    assert set(addresses) <= {b"http://www.w3.org"}  # SVG's name space, which nobody fetches


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    site.pause_s = 0.0
    with open_page(browser, site) as opened:
        yield opened


@browser_test
def test_an_answer_streams_and_says_what_became_of_its_tokens(page: Any, site: Site) -> None:
    reply = ask(site, QUESTION, "full")
    send(page, QUESTION)
    assert page.locator(".text").evaluate("(box) => box.textContent") == reply["text"]
    tokens = [token["source"] for round_ in reply["rounds"] for token in round_["tokens"]]
    found = page.locator(".text .token").evaluate_all("(all) => all.map((one) => one.classList[1])")
    assert found == tokens
    assert set(tokens) == set(SOURCES)
    marks = [page.locator(f".legend .{source} .mark") for source in SOURCES]
    lines = {mark.evaluate("(mark) => getComputedStyle(mark).textDecorationStyle") for mark in marks}
    assert len(lines) == len(SOURCES)
    spent = reply["speculation"]
    see(page.locator("#length")).to_have_text(f"{spent['acceptance_length']:.2f}")
    for name in ("drafted", "verified", "accepted"):
        see(page.locator(f"#{name}")).to_have_text(str(spent[name]))
    see(page.locator("#rate")).not_to_be_empty()
    see(page.locator(".column")).to_have_count(len(reply["rounds"]))
    see(page.locator("#model")).to_have_text("tiny-target")


@browser_test
def test_the_keyboard_is_enough(page: Any, site: Site) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    see(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    finish(page)
    assert bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    answer = page.locator(".text").evaluate("(box) => box.textContent")
    page.keyboard.press("Shift+Tab")
    see(page.locator("#strip")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    see(page.locator("#card")).to_contain_text(re.compile("verified|nothing drafted"))
    page.keyboard.press("Shift+Tab")
    see(page.locator(".text")).to_be_focused()
    assert page.locator(".text").evaluate("(box) => getComputedStyle(box).outlineStyle") == "solid"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    see(page.locator(".token.current")).to_have_attribute("data-index", "2")
    see(page.locator("#card")).to_be_visible()
    page.keyboard.press("Escape")
    see(page.locator("#card")).to_be_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    see(page.locator(".turn")).to_have_count(2)
    finish(page)
    assert [m["content"] for m in bodies[1]["messages"]] == ["one\ntwo", answer, "three"]


@browser_test
def test_escape_stops_and_frees_the_engine(page: Any, site: Site) -> None:
    site.pause_s = 0.05
    set_field(page, "max_tokens", 150)
    page.locator("#prompt").fill(QUESTION)
    page.locator("#prompt").press("Enter")
    page.locator(".text .token").first.wait_for()
    see(page.locator("#send")).to_have_text("Stop")
    page.keyboard.press("Escape")
    see(page.locator(".stats")).to_contain_text("stopped")
    eventually(lambda: site.running == 0)
    site.pause_s = 0.0
    send(page, QUESTION)
    see(page.locator(".stats").last).to_contain_text("150 tokens")


@browser_test
def test_pointing_at_a_token_shows_its_block(page: Any, site: Site) -> None:
    page.locator("select[name=speculative]").select_option("auto")  # which does not verify every slot
    send(page, QUESTION)
    reply = ask(site, QUESTION)
    round_ = next(r for r in reply["rounds"] if r["tokens"][-1]["source"] == "corrected" and r["accepted"])
    place = reply["rounds"].index(round_)
    token = page.locator(".text .round").nth(place).locator(".corrected")
    token.evaluate('(token) => token.scrollIntoView({ block: "center" })')
    token.dispatch_event("pointerover")
    card = page.locator("#card")
    rejected = round_["draft"][round_["accepted"]]
    percent = f"{round(100 * rejected['confidence'])} %"
    see(card).to_contain_text(f"slot {round_['accepted'] + 1} of {round_['drafted']}: the draft said")
    see(card.locator(".slots li")).to_have_count(round_["drafted"])
    see(card.locator(".slots .rejected .number")).to_have_text(percent)
    see(card.locator(".slots .accepted .fate").first).to_have_text("✓ accepted")
    see(card.locator(".slots .fate").last).to_have_text("not verified")
    box = card.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 1100
    page.mouse.move(5, 5)
    page.locator(".column").first.hover()
    see(card).to_contain_text(re.compile("gave"))


@browser_test
def test_a_refusal_is_told_and_the_text_given_back(page: Any) -> None:
    set_field(page, "max_tokens", 10_000)
    page.locator("#prompt").fill(QUESTION)
    page.locator("#prompt").press("Enter")
    see(page.locator(".failure")).to_contain_text("10000")
    see(page.locator("#prompt")).to_have_value(QUESTION)
    set_field(page, "max_tokens", 10)
    send(page, QUESTION)
    see(page.locator(".stats").last).to_contain_text("10 tokens")


@browser_test
def test_plain_decoding_runs_after_it_and_is_compared(page: Any, site: Site) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    site.most_running = 0
    page.locator("#compare").check()
    send(page, QUESTION)
    see(page.locator(".verdict")).to_contain_text("Identical: 40 tokens")
    assert bodies[1] == {**bodies[0], "speculative": False}
    assert site.most_running == 1, "the two runs slowed each other"
    first, second = page.locator(".text").evaluate_all("(all) => all.map((box) => box.textContent)")
    assert first == second
    assert page.locator(".answer").nth(1).locator(".token:not(.plain)").count() == 0
    set_field(page, "temperature", 1)
    send(page, QUESTION)
    see(page.locator(".verdict").last).to_contain_text("differ from token")


@browser_test
def test_the_page_recovers_when_the_server_comes_back(browser: Any) -> None:
    with serving() as site, open_page(browser, site) as page:
        site.stop()
        page.locator("#prompt").fill(QUESTION)
        page.locator("#prompt").press("Enter")
        see(page.locator("#gone")).to_contain_text("does not answer")
        see(page.locator("#prompt")).to_have_value(QUESTION)
        site.start()
        see(page.locator("#gone")).to_be_hidden()
        page.locator("#prompt").press("Enter")
        finish(page)
        see(page.locator(".stats").last).to_contain_text("40 tokens")


@browser_test
def test_a_key_is_asked_for_once(browser: Any) -> None:
    with serving(api_key=("secret",)) as site, open_page(browser, site) as page:
        page.locator("#prompt").fill(QUESTION)
        page.locator("#prompt").press("Enter")
        page.locator("#key").fill("secret")
        page.locator("#key").press("Enter")
        finish(page)
        see(page.locator(".stats").last).to_contain_text("40 tokens")
        see(page.locator("#model")).to_have_text("tiny-target")
        page.reload()
        send(page, QUESTION)
        see(page.locator("#key-form")).to_be_hidden()


@browser_test
def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, site: Site) -> None:
    with open_page(browser, site, has_touch=True, color_scheme="dark") as page:
        page.set_viewport_size({"width": 360, "height": 640})
        page.locator("summary").click()
        page.locator("#compare").check()
        send(page, QUESTION)
        page.locator(".text .token .mark:not(:empty)").last.tap()
        box = page.locator("#card").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
        for part in ("html", "body", "header", "main", "aside", ".talk", "#conversation", "#composer"):
            wide = page.locator(part).evaluate("(part) => part.scrollWidth - part.clientWidth")
            assert wide <= 0, f"{part} is {wide} pixels too wide"


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_follow_the_system_and_the_switch_and_can_be_read(browser: Any, site: Site, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with open_page(browser, site, color_scheme=scheme) as page:
        ground = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        for name, contrast in page.evaluate(CONTRASTS).items():
            assert contrast >= (3 if name.startswith(("edge", "plain")) else 4.5), name
        page.locator("#theme").click()
        page.reload()
        see(page.locator("html")).to_have_attribute("data-theme", other)
        assert page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor") != ground


@browser_test
def test_markup_is_text(page: Any) -> None:
    markup = '<img src="x" onerror="document.title=1"><b>bold</b>'
    page.locator(".modes label", has_text="Completion").click()
    send(page, markup)
    see(page.locator(".question")).to_have_text(markup)
    assert page.locator(".turn img, .turn b").count() == 0


@browser_test
def test_the_strip_keeps_the_newest_rounds(page: Any) -> None:
    set_field(page, "max_tokens", 200)
    rounds = 0
    while rounds <= 200:
        page.locator(".modes label", has_text="Completion").click()
        send(page, "x")
        rounds = page.locator(".text .round").count()
    see(page.locator(".column")).to_have_count(200)
    newest = page.locator(".column").first
    assert newest.bounding_box()["x"] > page.locator(".column").nth(1).bounding_box()["x"]
    see(newest).to_be_in_viewport()
    page.locator("#fresh").click()
    see(page.locator(".column")).to_have_count(0)


@browser_test
def test_the_draft_may_be_left_to_the_server(page: Any) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    send(page, QUESTION)
    page.locator("select[name=speculative]").select_option("auto")
    send(page, QUESTION)
    assert [body["speculative"] for body in bodies] == ["full", True]
