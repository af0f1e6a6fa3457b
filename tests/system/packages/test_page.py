"""The page in a real browser, headless: it streams, counts, shows candidates and calls, draws the deployment, restarts
services, and asks no other server.  PAGEANT_SCREENSHOTS names a folder for pictures.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common.adapters import write_adapter
from tests.browser import BROWSER, Chromium, Tab
from tests.system.harness import MODEL, Troupe, troupe

OPERATOR_KEY, OTHER_KEY = "battery-staple", "correct-horse"
ANSWER = ".turn.assistant:last-child"
TEXT = f"{ANSWER} .text.answer"
WORKER = ".service[data-service=worker]"
STORE = ".service[data-service=store]"
# A story ends when it is told; this one goes on for as long as it may.
ENDLESS = """(() => { const ask = window.fetch; window.fetch = (path, options) => ask(path, options?.body
    ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ignore_eos: true }) } : options); })()"""

pytestmark = pytest.mark.skipif(not BROWSER, reason="needs a Chromium (PAGEANT_TEST_BROWSER)")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    options = ["--num-blocks", "256", "--num-threads", "1", "--tool-call-parser", "hermes", "--resume-timeout", "100"]
    options += ["--store-memory", "32MiB"]
    keys = ["--api-keys", f"operator:{OPERATOR_KEY},acme:{OTHER_KEY}"]
    adapter = tmp_path_factory.mktemp("adapters") / "poet"
    write_adapter(MODEL, adapter, seed=3, scale=0.1)
    options += ["--lora-modules", f"poet={adapter}", "--max-loras", "1"]
    with troupe(tmp_path_factory.mktemp("page"), *options, *keys) as started:
        yield started


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def stranger(running: Troupe, chromium: Chromium) -> Iterator[Tab]:
    """The page, in which no key was given yet."""
    tab = chromium.open(running.url)
    yield tab
    own = (running.url, "data:", "about:")
    assert not [request["url"] for request in tab.requests() if not request["url"].startswith(own)]
    assert not tab.faults()
    tab.close()


@pytest.fixture
def page(stranger: Tab) -> Tab:
    """The page of an operator."""
    give_key(stranger, OPERATOR_KEY)
    return stranger


def give_key(tab: Tab, key: str) -> None:
    tab.fill("#key", key)
    tab.wait_for_text("#model", "pageant-stories")


def picture(tab: Tab, name: str) -> None:
    if folder := os.environ.get("PAGEANT_SCREENSHOTS"):
        tab.picture(Path(folder) / f"{name}.png")


def ask(tab: Tab, prompt: str, **fields: str) -> None:
    for name, value in fields.items():
        tab.fill(f"#{name}", value)
    tab.fill("#prompt", prompt)
    tab.press("Enter")


def answered(tab: Tab) -> str:
    tab.wait_for_text(f"{ANSWER} .figures", "finish reason")
    return tab.text(TEXT)


def bodies(tab: Tab, path: str) -> list[Any]:
    asked = [request for request in tab.requests() if request["url"].endswith(path) and "postData" in request]
    return [json.loads(request["postData"]) for request in asked]


def test_a_completion_shows_candidates_for_each_token_and_where_its_time_went(page: Tab) -> None:
    ask(page, "Once upon a time", max_tokens="60")
    assert len(answered(page)) > 80
    figures = page.text(f"{ANSWER} .figures")
    assert "60 completion tokens" in figures and "tokens/s" in figures and "5 prompt tokens" in figures
    assert page.count(f"{TEXT} .token") > 50
    page.hover(f"{TEXT} .token:nth-of-type(10)", shows="#tip.shown")
    assert page.count("#tip tr") >= 5 and page.count("#tip tr.own") == 1
    picture(page, "completion")
    first = page.text("#tip")
    page.run(f"document.querySelector('{TEXT}').focus()")
    page.press("ArrowRight")
    assert page.text("#tip") != first, "the arrow keys lead to the next token"
    (body,) = bodies(page, "/v1/completions")
    assert body["explain"] is True and body["model"] == "pageant-stories"
    titles = page.run(f"[...document.querySelectorAll('{ANSWER} .latency .bar i')].map((part) => part.title)")
    widths = page.run(f"[...document.querySelectorAll('{ANSWER} .latency .bar i')].map((part) => part.offsetWidth)")
    label = page.attribute(f"{ANSWER} .latency .bar", "aria-label") or ""
    assert len(titles) > 5 and all(title in label for title in titles) and max(widths) > 100
    legend = page.run(f"[...document.querySelectorAll('{ANSWER} .legend li')].map((entry) => entry.innerText)")
    shares = [float(entry.split()[-2]) for entry in legend]
    assert any(entry.startswith("decode") for entry in legend) and sum(shares) == pytest.approx(100, abs=3)
    assert re.search(r"[\d.]+ m?s of", page.text(f"{ANSWER} .cause"))


def test_an_adapter_is_chosen_beside_its_model_and_answers(page: Tab) -> None:
    groups = page.run(
        "[...document.querySelectorAll('#model optgroup')].map((group) => "
        "[group.label, ...[...group.children].map((option) => option.value)])"
    )
    assert groups == [["Models", "pageant-stories"], ["Adapters", "poet"]]
    said = {}
    for name in ("poet", "pageant-stories"):
        page.run(f"document.querySelector('#model').value = '{name}'; document.querySelector('#model').onchange()")
        ask(page, "Once upon a time", max_tokens="30", temperature="0")
        said[name] = answered(page)
        assert bodies(page, "/v1/completions")[-1]["model"] == name
        page.click("#clear")
    assert said["poet"] != said["pageant-stories"]
    picture(page, "adapters")


def test_a_worker_is_restarted_from_the_page_and_the_answer_pauses_and_goes_on(page: Tab, running: Troupe) -> None:
    page.run(ENDLESS)
    page.click("#view_both")
    page.wait_for_text(f"{WORKER} .state", "ready")
    asked = {"max_tokens": "500", "temperature": "0"}
    ask(page, "Once upon a time", **asked)
    undisturbed = answered(page)
    page.click("#clear")
    ask(page, "Once upon a time", **asked)
    page.until(f"document.querySelectorAll('{ANSWER} .token').length > 20")
    for pid in running.fork_servers("torch"):  # else the next worker would be there before a pause shows
        os.kill(pid, signal.SIGSTOP)
    page.click(f"{WORKER} .controls button")
    page.wait_for_text(f"{ANSWER} .pausing", "paused for")
    page.until(f"document.querySelector('{WORKER}').dataset.state !== 'ready'")
    picture(page, "paused")
    for pid in running.fork_servers("torch"):
        os.kill(pid, signal.SIGCONT)
    assert answered(page) == undisturbed, "no token is lost or other than it would have been"
    assert page.count(f"{TEXT} .seam") >= 1 and "paused" in page.text(f"{ANSWER} .figures")
    page.wait_for_text(".events", "worker-0 is ready")
    told = r"worker-0 (is leaving|\(process \d+\) is gone)"  # the page asks once a second
    assert re.search(told, page.text(".events"))
    page.click(".service[data-service=detokenizer] .stepper button:last-child")
    page.wait_for_text(".service[data-service=detokenizer] .state", "2 ready")
    assert page.count(".service[data-service=detokenizer] .processes li") == 2
    picture(page, "scaled")
    page.until("document.querySelector('.order').innerText === ''")
    page.click(".service[data-service=detokenizer] .stepper button:first-child")
    page.until("document.querySelector('.service[data-service=detokenizer] output').innerText === '1'")


def test_a_store_has_a_card_which_says_what_workers_gave_it_and_fetched(page: Tab) -> None:
    page.click("#view_deployment")
    page.wait_for_text(f"{STORE} .state", "ready")
    assert re.search(r"[\d,]+ blocks? given . [\d,]+ tokens? fetched", page.text(f"{STORE} .figures"))
    assert page.is_visible(f"{STORE} .controls")
    assert not page.is_visible(".service[data-service=draft]"), "there was none"


def test_a_chat_calls_a_tool_gets_its_result_and_goes_on_after_a_reload(page: Tab) -> None:
    page.click("#chat")
    page.run("document.querySelector('#use_tools').checked = true")
    ask(page, "What is the weather in Paris?", tool_choice="required", max_tokens="200", temperature="0.5", seed="3")
    page.wait_for_text(".card.call .name", "get_weather")
    page.until("document.querySelector('.calls button.main') !== null")
    assert page.text(".card.call dt") == "city" and "temperature" in page.value(".card.call input")
    picture(page, "tool")
    page.run("document.querySelector('#use_tools').checked = false")
    page.fill("#max_tokens", "20")
    page.click(".calls button.main")
    page.until("document.querySelectorAll('.turn.assistant').length === 2")
    assert answered(page)
    question, call, *results = bodies(page, "/v1/chat/completions")[-1]["messages"]
    assert question["role"] == "user" and call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert [result["tool_call_id"] for result in results] == [one["id"] for one in call["tool_calls"]]
    assert {result["role"] for result in results} == {"tool"}
    page.reload()
    page.wait_for_text("#model", "pageant-stories")
    assert page.attribute("#chat", "aria-pressed") == "true" and page.value("#temperature") == "0.5"
    ask(page, "And then?")
    assert answered(page)
    assert len(bodies(page, "/v1/chat/completions")[-1]["messages"]) == 2 + len(results) + 2


def test_an_answer_can_be_stopped_errors_are_shown_and_what_was_said_survives_a_reload(page: Tab) -> None:
    page.run(ENDLESS)
    page.fill("#max_tokens", "900")
    page.click(".examples button")
    page.until(f"document.querySelector('{TEXT} .token') !== null")
    page.press("Escape")
    page.wait_for_text(f"{ANSWER} .error", "stopped")
    said = page.text(TEXT)
    assert said and said in page.run("document.querySelector('#said').textContent")
    ask(page, "Once", top_p="7")
    page.wait_for_text(f"{ANSWER} .error", "top_p must be in (0, 1], got 7")
    page.reload()
    assert page.text(".turn.assistant .text.answer") == said and page.count(".turn") == 4
    page.click("#clear")
    page.reload()
    assert page.count(".turn") == 0 and page.count(".examples button") >= 2
    for stored in ("{", "[]", '{"turns": 5, "messages": [1], "fields": {"seed": {}}, "mode": 7, "view": "x"}'):
        page.run(f"localStorage.setItem('pageant', {json.dumps(stored)})")
        page.reload()
        page.wait_for_text("#model", "pageant-stories")
        assert page.count(".turn") == 0, "what another page put into the store harms nothing"


def test_a_key_is_asked_for_kept_in_the_tab_alone_and_only_an_operator_s_restarts(stranger: Tab) -> None:
    stranger.wait_for_text("#state", "asks for an API key")
    ask(stranger, "Once")
    stranger.wait_for_text(f"{ANSWER} .error", "asks for an API key")
    assert stranger.run("document.activeElement.id") == "key" and stranger.value("#prompt") == "Once"
    assert stranger.attribute("#key", "aria-invalid") == "true"
    stranger.fill("#key", "wrong-horse")
    stranger.wait_for_text("#state", "refuses this API key")
    give_key(stranger, OTHER_KEY)
    assert stranger.attribute("#key", "aria-invalid") is None
    stranger.click("#settings")
    stranger.click("#view_both")
    stranger.wait_for_text("#deployment > .note", "only a key of the tenant 'operator'")
    assert stranger.text(f"{WORKER} .state") == "ready" and not stranger.is_visible(f"{WORKER} .controls")
    give_key(stranger, OPERATOR_KEY)
    stranger.until(f"document.querySelector('{WORKER} .controls').checkVisibility()")
    assert not any(key in stranger.run("JSON.stringify(localStorage)") for key in (OPERATOR_KEY, OTHER_KEY))
    stranger.reload()
    assert stranger.value("#key") == OPERATOR_KEY


def test_it_fits_every_screen_and_every_control_has_a_name(page: Tab) -> None:
    for width, height in ((390, 844), (768, 1024), (1440, 900)):
        page.size(width, height)
        for view in ("conversation", "deployment") if width < 700 else ("conversation", "both", "deployment"):
            page.click(f"#view_{view}")
            assert page.is_visible("#conversation") == (view != "deployment")
            assert page.is_visible("#deployment") == (view != "conversation")
            assert page.run("document.documentElement.scrollWidth") <= width
            for name in ("#settings", "#prompt", "#send", "#answers", WORKER):
                if page.is_visible(name):
                    box = page.box(name)
                    assert box["x"] >= 0 and box["x"] + box["width"] <= width, (name, width, view)
            for scheme in ("light", "dark"):
                page.scheme(scheme)
                picture(page, f"{view}-{width}-{scheme}")
        page.click("#settings")
        assert page.is_visible("#key") and page.attribute("#settings", "aria-expanded") == "true"
        assert page.run("document.documentElement.scrollWidth") <= width
        picture(page, f"settings-{width}")
        page.click("#settings")
        assert not page.is_visible("#key") and page.attribute("#settings", "aria-expanded") == "false"
    unnamed = page.run(
        """[...document.querySelectorAll("input, textarea, select, button")]
        .filter((one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel).map((one) => one.id)"""
    )
    assert not unnamed and page.attribute("#said", "aria-live") == "polite"
