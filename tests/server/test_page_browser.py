"""The page in a headless Chromium: what it shows and streams, its look at several widths, keys, and keyboard use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.server.browser_checks import MOST_STREAMING, check_names, check_text, overflow
from tests.server.harness import Server, listening
from tests.server.pool_engine import PoolEngine

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

API, ADMIN = "sk-api-1234", "sk-admin-1234"
WIDTHS = (360, 768, 1440)
pytestmark = pytest.mark.slow

SLOW_MS = 60_000  # a busy machine is no failure


def find_chromium(playwright: Any) -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    own = playwright.chromium.executable_path
    return own if os.path.exists(own) else None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        executable = find_chromium(playwright)
        if executable is None:
            pytest.skip(
                "no Chromium: install the system's (apt-get install chromium), or run playwright install chromium"
            )
        # Chromium's own sandbox does not start as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """Opens pages of one address; at the end none may have said anything in the console, nor asked elsewhere."""
    with ExitStack() as stack:
        complaints: list[str] = []
        expected: list[str] = []

        def open_one(url: str, *, width: int = 1280, expect: str = "", **options: Any) -> Any:
            context = browser.new_context(viewport={"width": width, "height": 900}, **options)
            stack.callback(context.close)
            context.add_init_script(MOST_STREAMING)
            page = context.new_page()
            page.set_default_timeout(SLOW_MS)
            expected.append(expect)
            page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(url) else None)
            page.on("dialog", lambda dialog: dialog.accept())
            page.goto(url)
            return page

        yield open_one
        allowed = [words for words in expected if words]
        assert [text for text in complaints if not any(words in text for words in allowed)] == []


@pytest.fixture(scope="module")
def address(real) -> Iterator[str]:
    """The real engine's server."""
    with listening(real.app) as url:
        yield f"{url}/"


@contextmanager
def fake_server(**config: Any) -> Iterator[tuple[Server, str]]:
    server = Server(PoolEngine(**config))
    try:
        with listening(server.app) as url:
            yield server, f"{url}/"
    finally:
        server.close()


def expect(locator: Any) -> Any:
    return sync_api.expect(locator)


def status(page: Any, text: str) -> None:
    expect(page.locator("#status")).to_have_text(text, timeout=SLOW_MS)


def run(page: Any, prompt: str, max_tokens: int, route: str = "Completion") -> None:
    page.get_by_role("radio", name=route).check()
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Run").click()


def answers(page: Any) -> dict[str, str]:
    cards = page.locator("article.answer")
    return {card.get_attribute("data-model"): card.locator(".text").inner_text() for card in cards.all()}


def test_a_prompt_is_answered_side_by_side(open_page, address, real):
    page = open_page(address)
    status(page, "Live")
    picture = "document.querySelector('#map-canvas').toDataURL()"
    before = page.evaluate(picture)
    for name in ("all", "attn", "ranks"):
        page.get_by_role("checkbox", name=name, exact=True).check()
    run(page, "A long walk", 100)
    expect(page.locator(".state[data-state=done]")).to_have_count(4, timeout=SLOW_MS)
    found = answers(page)
    assert list(found) == ["base", "all", "attn", "ranks"]
    assert len(set(found.values())) == 4, "the adapters answer differently"
    assert page.evaluate("mostStreaming") >= 2, "the answers streamed one after the other"
    for card in page.locator("article.answer").all():
        assert "100 tokens, " in card.locator("footer").inner_text()
        assert "tok/s" in card.locator("footer").inner_text()
        assert card.locator(".text").get_attribute("aria-busy") == "false"
    # The map, its legend, the table and the figures have followed.
    expect(page.locator("#legend")).to_contain_text("ranks", timeout=SLOW_MS)
    assert page.evaluate(picture) != before
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="attn"))
    expect(row).to_contain_text("Device", timeout=SLOW_MS)
    expect(row).to_contain_text("100 out")
    expect(page.locator("#announce")).to_have_text("All answers have ended")
    assert page.locator(".line.one").first.get_attribute("d").startswith("M")


def test_stop_ends_all_answers(open_page, address, real):
    page = open_page(address)
    status(page, "Live")
    run(page, "Another walk", 240)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".state[data-state=waiting], .state[data-state=streaming]")).to_have_count(0, timeout=SLOW_MS)
    expect(page.get_by_role("button", name="Run")).to_be_enabled()
    expect(page.locator("#batch-count")).to_contain_text("0 of 4 running", timeout=SLOW_MS)


def test_the_keyboard_is_enough(open_page, address):
    page = open_page(address)
    status(page, "Live")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    seen = set()
    while page.evaluate("document.activeElement !== document.body"):
        focused = page.evaluate(
            "(e => [e.id || e.getAttribute('aria-label') || e.value || e.textContent, getComputedStyle(e).outlineStyle,"
            " e.matches('input[type=radio], input[type=checkbox]')])(document.activeElement)"
        )
        seen.add(focused[0])
        assert focused[1] != "none" or focused[2], f"no focus ring on {focused[0]}"
        page.keyboard.press("Tab")
    assert {"theme", "map", "prompt", "run", "max_tokens", "adapter-filter", "load-button"} <= seen
    pool = page.get_by_role("slider")
    pool.focus()
    assert pool.get_attribute("aria-valuetext").startswith("Page 1: ")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert pool.get_attribute("aria-valuetext").startswith("Page 3: ")
    page.keyboard.press("End")
    assert pool.get_attribute("aria-valuenow") == pool.get_attribute("aria-valuemax")
    expect(page.locator("#map-detail")).to_contain_text(pool.get_attribute("aria-valuetext"))
    # This base's vocabulary lacks the special tokens of the template: completions only.
    page.get_by_role("radio", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Completion")).to_be_checked()
    page.get_by_label("Max tokens").fill("2")
    page.get_by_label("Prompt", exact=True).fill("Hello")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".state[data-state=done]").first).to_be_visible(timeout=SLOW_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_readable_at_every_width(open_page, address, width, scheme):
    page = open_page(address, width=width, color_scheme=scheme)
    status(page, "Live")
    run(page, "Look", 3)
    expect(page.locator(".state[data-state=done]")).to_have_count(4, timeout=SLOW_MS)
    assert overflow(page) == []
    assert check_text(page) == []
    assert check_names(page) == []
    page.get_by_role("button", name="Key", exact=True).click()
    assert check_text(page) == []
    assert check_names(page) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_the_checks_themselves_notice(open_page, address):
    page = open_page(address)
    status(page, "Live")
    page.evaluate("document.querySelector('#pool-size').style.color = '#c9c9c9'")
    assert any("pages of" in fault for fault in check_text(page))
    page.evaluate("document.querySelector('#load-button').textContent = ''")
    assert check_names(page) == ["button"]
    page.evaluate("document.querySelector('#pool-size').style.paddingLeft = '2000px'")
    assert overflow(page)


def test_the_theme_can_be_chosen(open_page, address):
    page = open_page(address, color_scheme="light")
    status(page, "Live")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch to the dark theme").click()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark, "the choice is kept"
    page.get_by_role("button", name="Switch to the light theme").click()
    assert page.evaluate(background) == light


def test_less_motion_where_it_is_asked_for(open_page, address):
    page = open_page(address, reduced_motion="reduce")
    status(page, "Live")
    motion = "getComputedStyle(document.querySelector('.seat')).transitionDuration"
    assert page.evaluate(motion) == "0s"
    page.get_by_role("button", name="Pause").click()
    status(page, "Paused")
    page.get_by_role("button", name="Resume").click()
    status(page, "Live")


def test_keys_open_what_they_are_for(open_page, adapter_paths):
    config = {"api_keys": (API,), "admin_keys": (ADMIN,), "host": "0.0.0.0", "lora_modules": adapter_paths}
    with fake_server(**config) as (_, url):
        page = open_page(url, expect="the server responded with a status of 40")
        status(page, "Locked")
        expect(page.get_by_role("heading", name="This server asks for a key")).to_be_visible()
        expect(page.locator("#live")).to_be_hidden()

        def enter(key: str) -> None:
            page.locator("#key-button").click()
            page.get_by_label("API key or admin key").fill(key)
            page.get_by_role("button", name="Use this key").click()

        enter("sk-wrong")
        expect(page.get_by_role("heading", name="This key is not known here")).to_be_visible(timeout=SLOW_MS)
        enter(API)
        expect(page.get_by_role("heading", name="The live view needs an admin key")).to_be_visible(timeout=SLOW_MS)
        expect(page.locator("#adapters-empty")).to_contain_text("admin key")
        expect(page.get_by_role("checkbox", name="adapter-a")).to_be_checked(timeout=SLOW_MS)
        run(page, "hi", 30, route="Chat")
        expect(page.locator(".state[data-state=done]")).to_have_count(3, timeout=SLOW_MS)
        assert answers(page)["adapter-b"].startswith("adapter-b:")
        assert check_text(page) == []
        enter(ADMIN)
        status(page, "Live")
        expect(page.locator("#live")).to_be_visible()
        page.get_by_role("button", name="Pin adapter-b").click()
        expect(page.get_by_role("button", name="Unpin adapter-b")).to_be_visible(timeout=SLOW_MS)
        page.get_by_role("button", name="Unload adapter-a").click()
        expect(page.get_by_role("rowheader", name="adapter-a")).to_have_count(0, timeout=SLOW_MS)
        expect(page.get_by_role("checkbox", name="adapter-a")).to_have_count(0, timeout=SLOW_MS)
        stores = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]")
        assert ADMIN not in stores[0] + stores[2]
        assert ADMIN in stores[1]
        page.locator("#key-button").click()
        page.get_by_role("button", name="Forget it").click()
        status(page, "Locked")
        assert ADMIN not in page.evaluate("JSON.stringify(sessionStorage)")


def test_refusals_are_told(open_page, adapter_paths):
    config = {"lora_modules": adapter_paths, "adapter_requests_per_s": 0.01, "adapter_request_burst": 1}
    with fake_server(**config) as (server, url):
        page = open_page(url, expect="the server responded with a status of 503")
        status(page, "Live")
        run(page, "hi", 2)
        expect(page.locator(".state[data-state=done]")).to_have_count(3, timeout=SLOW_MS)
        run(page, "hi", 2)
        expect(page.locator(".state[data-state=failed]")).to_have_count(2, timeout=SLOW_MS)
        expect(page.locator("article.answer .error").first).to_contain_text("Try again in")
        page.get_by_label("Temperature").fill("-1")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("article.answer .error").first).to_contain_text("temperature", timeout=SLOW_MS)
        page.get_by_label("Prompt", exact=True).fill(" ")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#ask-error")).to_have_text("Write a prompt first.")
        context, engine = server.app.state.context, server.app.state.context._engine
        context._engine = None
        status(page, "Starting")
        context._engine = engine
        status(page, "Live")


def test_names_may_hold_markup(open_page, adapter_paths):
    name = "<img src=x onerror=document.title='got'><b>bold</b>"
    with fake_server(lora_modules={name: adapter_paths["adapter-a"]}) as (_, url):
        page = open_page(url)
        status(page, "Live")
        run(page, "<script>alert(1)</script>", 60)
        expect(page.locator(".state[data-state=done]")).to_have_count(2, timeout=SLOW_MS)
        assert answers(page)[name].startswith("<img src=x")
        expect(page.get_by_role("rowheader")).to_contain_text("<b>bold</b>")
        assert page.locator("main img, main b, main script").count() == 0
        assert page.title() == "multilora_jax"


def test_a_policy_stands_behind_the_escaping(open_page, address):
    page = open_page(address, expect="requires 'TrustedHTML'")
    status(page, "Live")
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } })()")
    assert refused == "TypeError"


def test_two_hundred_names_can_be_searched(open_page, adapter_paths):
    modules = {f"customer-{i:03}": adapter_paths["adapter-a"] for i in range(200)}
    with fake_server(lora_modules=modules) as (_, url):
        page = open_page(url)
        status(page, "Live")
        expect(page.locator("#models-note")).to_contain_text("160 more")
        page.get_by_label("Find an adapter").fill("customer-19")
        for i in range(190, 195):
            page.get_by_role("checkbox", name=f"customer-{i}").check()
        expect(page.locator("#picked")).to_have_text("8 of at most 8 adapters")
        expect(page.get_by_role("checkbox", name="customer-197")).to_be_disabled()
        run(page, "hi", 20)
        expect(page.locator(".state[data-state=done]")).to_have_count(9, timeout=SLOW_MS)
