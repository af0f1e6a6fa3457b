"""The page in a real browser, headless: it streams, counts, shows candidates, and asks nobody but its own server.

PAGEANT_TEST_BROWSER names a Chromium (chromium, chrome-headless-shell ...); PAGEANT_SCREENSHOTS a folder for pictures.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Troupe, troupe

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, to drive a browser")
NAMES = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome")
BROWSER = os.environ.get("PAGEANT_TEST_BROWSER") or next(
    (found for name in NAMES if (found := shutil.which(name))), None
)

API_KEY = "correct-horse"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (PAGEANT_TEST_BROWSER)")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--num-threads", "1"]
    with troupe(tmp_path_factory.mktemp("page"), *options) as started:
        yield started


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--num-threads", "1", "--api-keys", f"acme:{API_KEY}"]
    with troupe(tmp_path_factory.mktemp("guarded"), *options) as started:
        yield started


@pytest.fixture
def page(running: Troupe) -> Iterator[Any]:
    yield from opened_at(running)


@pytest.fixture
def guarded_page(guarded: Troupe) -> Iterator[Any]:
    yield from opened_at(guarded)


def opened_at(running: Troupe) -> Iterator[Any]:
    with playwright.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1100, "height": 760})
        wrong: list[str] = []
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.extend([message.text] if is_fault(message) else []))
        own = (running.url, "data:")
        opened.on("request", lambda request: wrong.extend([] if request.url.startswith(own) else [request.url]))
        opened.goto(running.url)
        yield opened
        browser.close()
        assert not wrong


def is_fault(message: Any) -> bool:
    """The browser itself reports every refused request; the page shows it."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("PAGEANT_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def answered(page: Any) -> str:
    page.wait_for_selector(".turn.assistant:last-child .figures:has-text('ended by')")
    return str(page.inner_text(".turn.assistant:last-child .text:nth-of-type(3)"))


def test_a_completion_streams_with_candidates_for_each_token(page: Any) -> None:
    page.wait_for_selector("#model:has-text('pageant-stories')")
    page.fill("#max_tokens", "60")
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn.assistant .token")
    assert len(answered(page)) > 80
    figures = page.inner_text(".turn.assistant .figures")
    assert "60 tokens" in figures and "tokens/s" in figures and "5 prompt tokens" in figures
    assert page.locator(".token").count() > 50
    page.locator(".token").nth(9).hover()
    page.wait_for_selector("#tip", state="visible")
    assert page.locator("#tip tr").count() >= 5 and page.locator("#tip tr.own").count() == 1
    picture(page, "completion")


def test_each_answer_shows_where_its_time_went(page: Any) -> None:
    asked = page.expect_request("**/v1/completions")
    page.fill("#max_tokens", "60")
    page.fill("#prompt", "Once upon a time there was a fox")
    with asked as sent:
        page.press("#prompt", "Enter")
    assert sent.value.post_data_json["explain"] is True
    answered(page)
    latency = page.locator(".turn.assistant .latency")
    bar = latency.get_by_role("img")
    widths = bar.locator("i").evaluate_all("parts => parts.map(part => part.getBoundingClientRect().width)")
    titles = bar.locator("i").evaluate_all("parts => parts.map(part => part.title)")
    label = bar.get_attribute("aria-label")
    assert len(widths) > 5 and sum(widths) == pytest.approx(bar.bounding_box()["width"], abs=1)
    assert all(title in label for title in titles)
    decoded = next(place for place, title in enumerate(titles) if title.startswith("decode "))
    assert widths[decoded] == max(widths), "of sixty tokens most of the time is decoding"
    cause = latency.locator(".cause").inner_text()
    assert re.fullmatch(r"[\d.]+ ms of [\d.]+ generating", cause)
    legend = latency.locator(".legend li").all_inner_texts()
    assert any(re.fullmatch(r"decode\s*[\d.]+ ms [\d.]+ %", entry) for entry in legend)
    shares = [float(entry.split()[-2]) for entry in legend]
    assert sum(shares) == pytest.approx(100, abs=3)
    assert "prompt tokens computed" in latency.locator(".counts").inner_text()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        latency.scroll_into_view_if_needed()
        picture(page, f"latency-{scheme}")


def test_a_chat_goes_on_from_what_was_said(page: Any) -> None:
    page.click("#chat")
    page.fill("#max_tokens", "40")
    for words in ("A story about a fox", "And then?"):
        page.fill("#prompt", words)
        page.click("#send")
        assert answered(page)
    assert page.locator(".turn").count() == 4 and page.locator(".latency .bar").count() == 2
    picture(page, "chat")


def test_an_answer_can_be_stopped_and_errors_are_shown(page: Any) -> None:
    page.fill("#max_tokens", "900")
    page.fill("#prompt", "Once")
    page.click("#send")
    page.wait_for_selector(".turn.assistant .token")
    page.click("#cancel")
    page.wait_for_selector(".error:has-text('stopped')")
    page.fill("#top_p", "7")
    page.fill("#prompt", "Once")
    page.click("#send")
    page.wait_for_selector(".error:has-text('top_p must be in (0, 1], got 7')")


def test_escape_stops_and_what_was_said_survives_a_reload(page: Any) -> None:
    page.fill("#max_tokens", "900")
    page.fill("#temperature", "0.5")
    page.click(".examples button >> nth=0")
    page.wait_for_selector(".turn.assistant .token")
    page.keyboard.press("Escape")
    page.wait_for_selector(".error:has-text('stopped')")
    assert page.locator(".examples").count() == 0
    said = page.inner_text(".turn.assistant .text:nth-of-type(3)")
    assert said and said in page.inner_text("#said")
    page.reload()
    assert page.inner_text(".turn.assistant .text:nth-of-type(3)") == said
    assert page.inner_text(".turn.user .text:nth-of-type(3)") == "Once upon a time"
    assert "stopped" in page.inner_text(".turn.assistant .figures")
    assert (page.input_value("#max_tokens"), page.input_value("#temperature")) == ("900", "0.5")
    page.click("#clear")
    page.reload()
    assert page.locator(".turn").count() == 0 and page.locator(".examples button").count() >= 2


def test_a_chat_goes_on_after_a_reload(page: Any) -> None:
    page.click("#chat")
    page.fill("#max_tokens", "20")
    page.fill("#prompt", "A story about a fox")
    page.click("#send")
    first = answered(page)
    page.reload()
    assert page.get_attribute("#chat", "aria-pressed") == "true"
    page.fill("#prompt", "And then?")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#send")
    contents = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert contents[0] == "A story about a fox" and contents[1].strip() == first.strip() and contents[2] == "And then?"


def test_a_key_is_asked_for_honestly_and_kept_in_the_tab_alone(guarded_page: Any) -> None:
    page = guarded_page
    page.wait_for_selector("#state:has-text('asks for an API key')")
    page.fill("#prompt", "Once")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".error:has-text('asks for an API key')")
    assert page.evaluate("document.activeElement.id") == "key"
    assert page.get_attribute("#key", "aria-invalid") == "true" and page.input_value("#prompt") == "Once"
    page.fill("#key", "wrong-horse")
    page.press("#key", "Tab")
    page.wait_for_selector("#state:has-text('refuses this API key')")
    page.fill("#key", API_KEY)
    page.press("#key", "Tab")
    page.wait_for_selector("#model:has-text('pageant-stories')")
    assert page.get_attribute("#key", "aria-invalid") is None
    page.fill("#max_tokens", "10")
    page.press("#prompt", "Enter")
    assert answered(page)
    assert API_KEY not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    assert page.input_value("#key") == API_KEY


@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1440, 900)])
def test_it_fits_every_screen(page: Any, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    is_narrow = width < 700
    assert page.is_visible("#settings") == is_narrow and page.is_visible("#key") != is_narrow
    if is_narrow:
        for is_open in (True, False):
            page.click("#settings")
            assert page.is_visible("#key") == is_open
            assert page.get_attribute("#settings", "aria-expanded") == str(is_open).lower()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#prompt", "#send", "#answers"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        picture(page, f"{width}-{scheme}")


def test_every_control_has_a_name(page: Any) -> None:
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, textarea, button")]
        .filter((one) => !one.labels?.length && !one.innerText.trim() && !one.ariaLabel).map((one) => one.id)"""
    )
    assert not unnamed
    assert page.get_attribute("#said", "aria-live") == "polite"


def test_what_another_server_put_into_the_store_harms_nothing(page: Any) -> None:
    wrong = ("{", "[]", '{"turns": 5, "messages": [1], "fields": {"seed": {}}, "mode": 7}', '{"turns": [{"who": "x"}]}')
    for stored in wrong:
        page.evaluate("text => localStorage.setItem('pageant', text)", stored)
        page.reload()
        page.wait_for_selector("#model:has-text('pageant-stories')")
        assert page.locator(".turn").count() == 0
