"""A real server with the real small model, and a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.server import Server
from tests.support.services import program

# Without the last ones Chromium asks for its maker's servers at each start.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_PATIENCE_MS = 20_000
_numbers = count(1)
expect.set_options(timeout=_PATIENCE_MS)


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one-process server with the default model, as ``make run`` starts it."""
    with Server(tmp_path_factory.mktemp("smollm"), {"TEMPERATURE": "0"}) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program("chromium"), args=_ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def new_context(browser: Browser, smollm: Server) -> Iterator[Callable[..., BrowserContext]]:
    """Makes browser profiles; fails the test if a page of one logged an error or broke the security policy."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(**options: object) -> BrowserContext:
        context = browser.new_context(base_url=smollm.base_url, **options)  # type: ignore[arg-type]
        context.set_default_timeout(_PATIENCE_MS)
        context.on("weberror", lambda error: complaints.append(str(error.error)))
        context.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        contexts.append(context)
        return context

    yield make
    for context in contexts:
        context.close()
    # A test that cuts the connection sees the browser report just that.
    assert [text for text in complaints if "ERR_INTERNET_DISCONNECTED" not in text] == []


@pytest.fixture
def page(new_context: Callable[..., BrowserContext]) -> Page:
    """The chat page of a user who has just signed up."""
    return open_chat(new_context())


def open_chat(context: BrowserContext) -> Page:
    page = context.new_page()
    page.goto("/accounts/sign-up/")
    page.locator("[name=username]").fill(f"reader{next(_numbers)}")
    for field in ("password1", "password2"):
        page.locator(f"[name={field}]").fill("correct horse battery")
    page.locator("form.stack button").click()
    page.wait_for_url("/")
    return page
