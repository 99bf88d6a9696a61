"""The web chat in Chromium, answered by the real small model."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, WebSocketRoute, expect

from tests.e2e.conftest import open_chat
from tests.support.server import Server

LONG_STORY = "Write a long story about a lighthouse."


def send(page: Page, text: str) -> None:
    page.get_by_test_id("composer").fill(text)
    page.get_by_test_id("composer").press("Enter")


def answers(page: Page) -> Locator:
    return page.locator('[data-testid=message][data-role="assistant"]')


def finished(page: Page, number: int) -> Locator:
    """The number-th answer, once it is complete; counted from 1."""
    answer = answers(page).nth(number - 1)
    expect(answer).to_have_attribute("data-state", re.compile("done|stopped|failed"), timeout=60_000)
    return answer


def text_of(message: Locator) -> str:
    return message.get_by_test_id("message-text").inner_text()


def wait_for_text(message: Locator, at_least: int) -> None:
    expect(message.get_by_test_id("message-text")).to_have_text(re.compile(rf"^[\s\S]{{{at_least},}}$"))


def use_short_answers(page: Page, tokens: int = 12) -> None:
    page.get_by_test_id("settings-open").click()
    page.locator("[name=max_output_tokens]").fill(str(tokens))
    page.get_by_test_id("settings-save").click()
    expect(page.get_by_test_id("settings-dialog")).to_be_hidden()


# --- A conversation -----------------------------------------------------------------------------------


def test_three_turns_and_a_reload(page: Page) -> None:
    expect(page.get_by_test_id("empty-state")).to_be_visible()
    use_short_answers(page, 30)
    for number, text in enumerate(["Hello! Who are you?", "Name a colour.", "And another one?"], start=1):
        send(page, text)
        expect(page.get_by_test_id("composer")).to_have_value("")
        expect(finished(page, number).get_by_test_id("cache-line")).to_contain_text("from cache")
    expect(page).to_have_url(re.compile(r"/c/[0-9a-f-]{36}/$"))
    expect(page).to_have_title(re.compile("Hello! Who are you"))
    expect(page.get_by_test_id("conversation-row")).to_have_count(1)
    shares = [
        int(re.findall(r"(\d+)%", line)[0]) for line in page.get_by_test_id("cache-line").all_inner_texts()
    ]
    assert shares[0] == 0
    assert min(shares[1:]) > 50
    before = page.get_by_test_id("message").all_inner_texts()
    page.reload()
    expect(page.get_by_test_id("message")).to_have_count(6)
    assert page.get_by_test_id("message").all_inner_texts() == before


def test_messages_sent_while_an_answer_streams_wait_their_turn(page: Page) -> None:
    use_short_answers(page, 60)
    send(page, LONG_STORY)
    wait_for_text(answers(page).nth(0), 5)
    send(page, "Thank you.")
    finished(page, 2)
    assert [message.get_attribute("data-role") for message in page.get_by_test_id("message").all()] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_code_is_highlighted_and_can_be_copied(new_context: Callable[..., BrowserContext]) -> None:
    context = new_context(permissions=["clipboard-read", "clipboard-write"])
    page = open_chat(context)
    use_short_answers(page, 150)
    send(page, "Write a Python function that adds two numbers. Show the code in a code block.")
    answer = finished(page, 1)
    code = answer.locator("pre code").first
    expect(code.locator("[class^=hljs]").first).to_be_visible()
    answer.get_by_test_id("copy-code").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == code.inner_text().strip()
    assert "def " in copied


# --- Reload, tabs, connections ------------------------------------------------------------------------


def test_a_reload_in_mid_answer_shows_the_whole_answer(page: Page) -> None:
    use_short_answers(page, 100)
    send(page, LONG_STORY)
    wait_for_text(answers(page).nth(0), 20)
    beginning = text_of(answers(page).nth(0))[:15]
    page.reload()
    expect(answers(page).nth(0)).to_have_attribute("data-state", "streaming")
    whole = text_of(finished(page, 1))
    assert whole.startswith(beginning)
    page.reload()
    expect(answers(page)).to_have_count(1)
    assert text_of(finished(page, 1)) == whole


def test_a_second_tab_shows_the_same(page: Page) -> None:
    use_short_answers(page, 60)
    send(page, LONG_STORY)
    wait_for_text(answers(page).nth(0), 5)
    other = page.context.new_page()
    other.goto(page.url)
    wait_for_text(answers(other).nth(0), 5)
    whole = text_of(finished(page, 1))
    assert text_of(finished(other, 1)) == whole
    send(other, "Thank you.")
    finished(other, 2)
    assert text_of(finished(page, 2)) == text_of(answers(other).nth(1))


def test_a_lost_connection_comes_back_with_the_rest(new_context: Callable[..., BrowserContext]) -> None:
    sockets: list[WebSocketRoute] = []

    def through(route: WebSocketRoute) -> None:
        sockets.append(route)
        route.connect_to_server()

    context = new_context()
    context.route_web_socket(re.compile("/ws/$"), through)
    page = open_chat(context)
    use_short_answers(page, 100)
    send(page, LONG_STORY)
    for length in (10, 40):
        wait_for_text(answers(page).nth(0), length)
        sockets[-1].close(code=1012)
        expect(answers(page).nth(0)).to_have_attribute("data-state", "streaming")
    whole = text_of(finished(page, 1))
    assert len(sockets) >= 3
    page.reload()
    expect(answers(page)).to_have_count(1)
    assert text_of(finished(page, 1)) == whole


# --- Stop, again, otherwise -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_keeps_what_was_written(page: Page, how: str) -> None:
    send(page, LONG_STORY)
    wait_for_text(answers(page).nth(0), 10)
    if how == "button":
        page.get_by_test_id("stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answers(page).nth(0)).to_have_attribute("data-state", "stopped")
    assert len(text_of(answers(page).nth(0))) >= 10
    expect(page.get_by_test_id("stop")).to_be_hidden()


def test_regenerate_edit_and_the_arrows_between_branches(page: Page) -> None:
    use_short_answers(page)
    send(page, "Say hello.")
    first = finished(page, 1)
    first.hover()
    first.get_by_test_id("regenerate").click()
    expect(answers(page).nth(0).get_by_test_id("branch-count")).to_have_text(re.compile(r"2\s*/\s*2"))
    finished(page, 1)
    answers(page).nth(0).get_by_test_id("branch-previous").click()
    expect(answers(page).nth(0).get_by_test_id("branch-count")).to_have_text(re.compile(r"1\s*/\s*2"))

    question = page.locator('[data-testid=message][data-role="user"]').first
    question.hover()
    question.get_by_test_id("edit").click()
    page.get_by_test_id("edit-box").fill("Say goodbye.")
    page.get_by_test_id("edit-save").click()
    question = page.locator('[data-testid=message][data-role="user"]').first
    expect(question.get_by_test_id("message-text")).to_have_text("Say goodbye.")
    finished(page, 1)
    question.get_by_test_id("branch-previous").click()
    expect(question.get_by_test_id("message-text")).to_have_text("Say hello.")
    page.reload()
    expect(question.get_by_test_id("message-text")).to_have_text("Say hello.")
    expect(question.get_by_test_id("branch-count")).to_have_text(re.compile(r"1\s*/\s*2"))


# --- Sidebar and settings -------------------------------------------------------------------------------


def test_rename_search_and_delete(page: Page) -> None:
    for text in ("Tell me about owls.", "Tell me about bread."):
        use_short_answers(page)
        send(page, text)
        finished(page, 1)
        page.get_by_test_id("new-chat").click()
        expect(page.get_by_test_id("empty-state")).to_be_visible()
    rows = page.get_by_test_id("conversation-row")
    expect(rows).to_have_count(2)

    owls, bread = rows.filter(has_text="owls"), rows.filter(has_text="bread")
    owls.hover()
    owls.get_by_test_id("row-menu").click()
    owls.get_by_test_id("rename").click()
    page.get_by_test_id("rename-box").fill("Night <i>birds</i>")
    page.get_by_test_id("rename-box").press("Enter")
    expect(rows.filter(has_text="Night <i>birds</i>")).to_have_count(1)

    page.get_by_test_id("search").fill("bread")
    expect(rows).to_have_count(1)
    page.get_by_test_id("search").fill("")
    expect(rows).to_have_count(2)

    bread.hover()
    bread.get_by_test_id("row-menu").click()
    bread.get_by_test_id("delete").click()
    page.get_by_test_id("confirm-delete").click()
    expect(rows).to_have_count(1)
    page.reload()
    expect(rows).to_have_text(re.compile("Night <i>birds</i>"))


def test_settings_are_kept_and_mistakes_are_shown_at_the_field(page: Page) -> None:
    use_short_answers(page)
    send(page, "Hello")
    finished(page, 1)
    page.get_by_test_id("settings-open").click()
    page.locator("[name=temperature]").fill("9")
    page.get_by_test_id("settings-save").click()
    expect(page.locator('[data-error-of="temperature"]')).not_to_be_empty()
    page.locator("[name=temperature]").fill("0.5")
    page.locator("[name=system_prompt]").fill("Answer like a pirate.")
    page.get_by_test_id("settings-save").click()
    expect(page.get_by_test_id("settings-dialog")).to_be_hidden()
    page.reload()
    finished(page, 1)
    page.get_by_test_id("settings-open").click()
    expect(page.locator("[name=system_prompt]")).to_have_value("Answer like a pirate.")
    expect(page.locator("[name=temperature]")).to_have_value("0.5")


# --- Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>",
        "[link](javascript:window.hurt=1) <svg onload=window.hurt=1>",
        "שלום \u202eabc\u202c עולם",
    ],
)
def test_markup_in_messages_and_titles_is_text(page: Page, text: str) -> None:
    use_short_answers(page, 4)
    send(page, text)
    finished(page, 1)
    question = page.locator('[data-testid=message][data-role="user"]').first
    expect(question.get_by_test_id("message-text")).to_have_text(text)
    expect(page.get_by_test_id("conversation-row")).to_contain_text(text[:12])
    assert page.evaluate("window.hurt") is None
    assert page.locator("script:not([src]):not([type='application/json'])").count() == 0


def test_answers_are_sanitized(page: Page) -> None:
    """What a model could be made to write goes through the same renderer as what it does write."""
    rendered = page.evaluate(
        """async () => {
            const { Markdown } = await import('/static/chat/markdown.js');
            const target = document.createElement('div');
            new Markdown(target).update(
                '<script>window.hurt=1</script>\\n\\n<img src=x onerror="window.hurt=1">\\n\\n' +
                '[a](javascript:alert(1)) [b](data:text/html,x) [c](https://example.org/)\\n\\n' +
                '![i](https://example.org/i.png)\\n\\n<form action=/><input></form><p style="color:red">x</p>',
            );
            document.body.append(target);
            return {
                elements: [...new Set([...target.querySelectorAll('*')].map((e) => e.localName))],
                attributes: [...target.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()),
                links: [...target.querySelectorAll('[href]')].map((e) => e.getAttribute('href')),
            };
        }"""
    )
    assert page.evaluate("window.hurt") is None
    assert set(rendered["elements"]) <= {"div", "p", "a"}
    assert set(rendered["attributes"]) <= {"class", "dir", "rel", "target", "href"}
    assert rendered["links"] == ["https://example.org/", "https://example.org/i.png"]


def test_a_message_longer_than_the_context_is_explained_and_can_be_edited(page: Page) -> None:
    use_short_answers(page)
    page.get_by_test_id("composer").fill("word " * 9000)
    page.get_by_test_id("send").click()
    answer = finished(page, 1)
    expect(answer).to_have_attribute("data-state", "failed")
    expect(answer.get_by_test_id("message-error")).to_contain_text("8,192")
    expect(answer.get_by_test_id("retry")).to_be_visible()
    page.locator('[data-testid=message][data-role="user"]').first.hover()
    page.get_by_test_id("edit").first.click()
    page.get_by_test_id("edit-box").fill("Hello")
    page.get_by_test_id("edit-save").click()
    expect(finished(page, 1)).to_have_attribute("data-state", "done")


def test_a_refused_message_keeps_its_text(page: Page) -> None:
    page.get_by_test_id("composer").fill("x" * 200_001)
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("composer-error")).to_contain_text("200,000")
    assert len(page.get_by_test_id("composer").input_value()) == 200_001
    page.get_by_test_id("composer").fill("   ")
    expect(page.get_by_test_id("send")).to_be_disabled()


def test_an_unknown_conversation_says_so(page: Page) -> None:
    page.goto("/c/00000000-0000-4000-8000-000000000000/")
    expect(page.get_by_test_id("composer-error")).to_contain_text("not there any more")
    expect(page.get_by_test_id("empty-state")).to_be_visible()


# --- Keyboard, looks, language --------------------------------------------------------------------------


def test_keyboard(page: Page) -> None:
    use_short_answers(page)
    composer = page.get_by_test_id("composer")
    composer.click()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    expect(composer).to_have_value("first line\nsecond line")
    page.keyboard.press("Enter")
    expect(page.locator('[data-role="user"]').get_by_test_id("message-text")).to_have_text(
        "first line\nsecond line", use_inner_text=True
    )
    finished(page, 1)
    page.keyboard.press("Control+Shift+O")
    expect(page.get_by_test_id("empty-state")).to_be_visible()
    page.keyboard.press("Control+K")
    expect(page.get_by_test_id("search")).to_be_focused()


def test_enter_that_ends_a_composition_does_not_send(page: Page) -> None:
    composer = page.get_by_test_id("composer")
    composer.fill("nihao")
    composer.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(page.get_by_test_id("message")).to_have_count(0)
    expect(composer).to_have_value("nihao")


def test_dark_and_light(page: Page) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    seen = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        seen[scheme] = background()
    assert seen["light"] != seen["dark"]
    page.get_by_test_id("user-menu").click()
    page.get_by_test_id("theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    assert background() == seen["light"]
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_phone_width(new_context: Callable[..., BrowserContext]) -> None:
    page = open_chat(new_context(viewport={"width": 360, "height": 740}, has_touch=True))
    use_short_answers(page)
    send(page, "Hello, phone")
    finished(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs over the edge"
    expect(page.get_by_test_id("sidebar")).not_to_be_in_viewport()
    page.get_by_test_id("menu-toggle").click()
    expect(page.get_by_test_id("conversation-row")).to_be_in_viewport()
    page.get_by_test_id("conversation-row").click()
    expect(page.get_by_test_id("sidebar")).not_to_be_in_viewport()


def test_the_page_speaks_chinese(new_context: Callable[..., BrowserContext]) -> None:
    page = open_chat(new_context(locale="zh-CN"))
    expect(page.get_by_test_id("new-chat")).to_contain_text("新")
    use_short_answers(page)
    send(page, "你好！")
    expect(finished(page, 1).get_by_test_id("cache-line")).to_contain_text("缓存")


def test_the_printed_link_opens_the_chat_once(
    smollm: Server, new_context: Callable[..., BrowserContext]
) -> None:
    page = new_context().new_page()
    page.goto(smollm.sign_in_link)
    expect(page.get_by_test_id("composer")).to_be_visible()
    other = new_context().new_page()
    other.goto(smollm.sign_in_link)
    expect(other).to_have_url(re.compile("/accounts/sign-in/"))
