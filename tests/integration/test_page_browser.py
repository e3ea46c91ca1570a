"""The page at `/` in a real browser: the key, an answer as it comes, stopping, errors, the cluster."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect
from running import Running

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "8000", "--mock-token-us", "1",
    "--router-local-prefill-tokens", "0",
)  # fmt: skip
KEY = "baton-of-the-test"
WATCH = """() => {
  window.grown = 0;  // how often something came
  const seen = new MutationObserver(() => { window.grown += 1; });
  seen.observe(document.getElementById("log"), { subtree: true, childList: true });
}"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("page"), *FLAGS, environ={"BATON_GATEWAY_API_KEY": KEY}) as running:
        yield running
        assert "Traceback" not in running.log


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "the page's tests need a browser: apt-get install chromium"
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        await running.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, baton: Running) -> AsyncIterator[Page]:
    """The page as it opens. It must ask nobody but its own gateway, and keep to its policy."""
    tab = await browser.new_context()
    opened = await tab.new_page()
    asked: list[str] = []
    said: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("console", lambda message: said.append(message.text))
    await opened.goto(baton.url + "/")
    yield opened
    await tab.close()
    assert asked and all(url.startswith(baton.url) for url in asked), asked
    refusals = re.compile(r"Failed to load resource: .* status of 4\d\d")  # which the page tells of itself
    assert not [text for text in said if not refusals.match(text)]


async def enter(page: Page) -> None:
    await page.get_by_label("API key").fill(KEY)
    await page.get_by_role("button", name="Use key").click()
    await expect(page.get_by_label("API key")).to_be_hidden()
    await expect(page.get_by_label("Decode workers")).to_contain_text("decode-0")


async def test_it_asks_for_the_key_and_shows_the_cluster(page: Page) -> None:
    await expect(page.get_by_role("status")).to_have_text(re.compile("a key is required"))
    await page.get_by_label("API key").fill("wrong")
    await page.get_by_role("button", name="Use key").click()
    await expect(page.get_by_role("status")).to_have_text("that key is not valid")
    await enter(page)
    await expect(page.get_by_role("status")).to_have_text("ready")
    await expect(page.get_by_label("Prefill workers").get_by_role("listitem")).to_have_count(1)
    for name in ("gateway-0", "tokenizer-0", "router-0", "kvstore-0", "metrics-0"):
        await expect(page.get_by_label("Other services")).to_contain_text(name)
    await expect(page.get_by_label("Model")).to_have_value("mock")
    await page.reload()  # the key is remembered while the tab is open
    await expect(page.get_by_label("Decode workers")).to_contain_text("decode-0")
    await expect(page.get_by_label("API key")).to_be_hidden()


async def test_an_answer_comes_word_by_word_and_tells_where_its_time_went(page: Page) -> None:
    await enter(page)
    await page.get_by_role("button", name="Options").click()
    await page.get_by_label("Most tokens").fill("120")
    text = f"Tell me about <b>{uuid.uuid4()}</b> 😀"
    await page.evaluate(WATCH)
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")
    turns = page.locator(".turn")
    await expect(turns.first).to_have_text(text)
    await expect(page.locator(".facts")).to_have_count(2, timeout=20_000)
    assert await page.evaluate("grown") >= 10, "it comes all at once"
    facts = await turns.nth(1).inner_text()
    assert "first token" in facts and "120 written" in facts and "tokens/s" in facts
    assert "of KV from prefill-0 to decode-0 over shm" in facts
    for stage in ("tokenize", "router", "queue", "prefill", "hand-off", "decode"):
        assert stage in facts
    await page.get_by_label("Message").fill("And again")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator(".legend")).to_have_count(2)
    await page.get_by_role("button", name="New conversation").click()
    await expect(turns).to_have_count(0)
    await expect(page.get_by_role("heading", level=2)).to_be_visible()


async def test_stopping_frees_what_was_running(page: Page, baton: Running) -> None:
    await enter(page)
    await page.get_by_role("button", name="Options").click()
    await page.get_by_label("Most tokens").fill("2000")
    await page.get_by_role("button", name="What is the capital of France?").click()
    answer = page.locator(".turn").nth(1)
    await expect(answer.locator("p").last).to_have_text(re.compile("....."))
    await expect(page.get_by_label("Decode workers")).to_contain_text("1 running")
    await page.get_by_role("button", name="Stop").click()
    await expect(answer).to_contain_text("stopped")
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await expect(page.get_by_label("Decode workers")).to_contain_text("0 running")
    assert baton.process.poll() is None


async def test_an_error_is_shown_where_the_answer_would_be(page: Page) -> None:
    await enter(page)
    await page.get_by_role("button", name="Options").click()
    await page.get_by_label("Temperature").fill("7")
    await page.evaluate("document.getElementById('say').noValidate = true")
    await page.get_by_label("Message").fill("hi")
    await page.get_by_label("Message").press("Enter")
    await expect(page.locator(".turn .wrong")).to_have_text(re.compile("temperature"))
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
