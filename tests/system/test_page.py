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

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium (PAGEANT_TEST_BROWSER)")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--num-threads", "1"]
    with troupe(tmp_path_factory.mktemp("page"), *options) as started:
        yield started


@pytest.fixture
def page(running: Troupe) -> Iterator[Any]:
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
    ledger = page.locator(".turn.assistant .ledger")
    bar = ledger.get_by_role("img")
    widths = bar.locator("i").evaluate_all("parts => parts.map(part => part.getBoundingClientRect().width)")
    titles = bar.locator("i").evaluate_all("parts => parts.map(part => part.title)")
    label = bar.get_attribute("aria-label")
    assert len(widths) > 5 and sum(widths) == pytest.approx(bar.bounding_box()["width"], abs=1)
    assert all(title in label for title in titles)
    decoded = next(place for place, title in enumerate(titles) if title.startswith("decode "))
    assert widths[decoded] == max(widths), "of sixty tokens most of the time is decoding"
    cause = ledger.locator(".cause").inner_text()
    assert re.fullmatch(r"[\d.]+ ms of [\d.]+ generating", cause)
    legend = ledger.locator(".legend li").all_inner_texts()
    assert any(re.fullmatch(r"decode\s*[\d.]+ ms [\d.]+ %", entry) for entry in legend)
    shares = [float(entry.split()[-2]) for entry in legend]
    assert sum(shares) == pytest.approx(100, abs=3)
    assert "prompt tokens computed" in ledger.locator(".counts").inner_text()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ledger.scroll_into_view_if_needed()
        picture(page, f"ledger-{scheme}")


def test_a_chat_goes_on_from_what_was_said(page: Any) -> None:
    page.click("#chat")
    page.fill("#max_tokens", "40")
    for words in ("A story about a fox", "And then?"):
        page.fill("#prompt", words)
        page.click("#send")
        assert answered(page)
    assert page.locator(".turn").count() == 4 and page.locator(".ledger .bar").count() == 2
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
