"""Requests: the newest ones, what runs, filters and details."""

import json
import re
import urllib.request

import pytest
from playwright.sync_api import expect

from loraplex.testing.running_server import MODEL
from support.engine_kills import held_engine
from support.listed_requests import complete, rows


def set_hidden(page, *, is_hidden):
    """Hide a page, or show it again, as another tab in front of it does."""
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', "
        "{ get: () => hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        is_hidden,
    )


def test_nothing_yet_then_a_request(visits, server):
    page = visits.open("requests?adapter=nobody")
    page.get_by_text("No request matches the filters.").wait_for()
    assert complete(server, model="chinese", ignore_eos=True) == 200
    page = visits.open("requests?adapter=chinese")
    row = rows(page).first
    row.get_by_text("chinese").wait_for()
    assert row.locator(".phases").get_attribute("aria-label").count("ms") >= 2
    row.get_by_role("button").click()
    details = row.locator(".request-details")
    details.get_by_text("the test").wait_for()
    details.get_by_text("HTTP POST /v1/completions".replace("HTTP", "http")).wait_for()
    details.get_by_text("length", exact=True).wait_for()
    for name in ("Prefill", "Decode"):
        details.get_by_text(name, exact=True).wait_for()


def test_what_comes_while_one_looks(visits, server):
    page = visits.open("requests?adapter=japanese")
    page.get_by_text("No request matches the filters.").wait_for()
    complete(server, model="japanese")
    rows(page).first.wait_for()
    page.get_by_role("button", name="Pause").click()
    complete(server, model="japanese")
    page.wait_for_timeout(2500)
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Go on").click()
    rows(page).nth(1).wait_for()
    expect(rows(page)).to_have_count(2)


def test_an_open_request_moves(visits, server):
    page = visits.open("requests?status=open")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "n": 16}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        response.readline()
        with held_engine(server):
            rows(page).first.get_by_text("decoding").wait_for()
    page.get_by_text("No request matches the filters.").wait_for()


def test_filters_are_in_the_address(visits, server):
    complete(server)
    assert complete(server, model="nowhere") == 404
    page = visits.open("requests")
    page.get_by_label("Status").select_option("error")
    page.get_by_text("404 model_not_found").first.wait_for()
    expect(rows(page).filter(has_text="base model")).to_have_count(0)
    assert page.url.endswith("#/requests?status=error")
    page.reload()
    page.get_by_text("404 model_not_found").first.wait_for()
    assert page.get_by_label("Status").input_value() == "error"


def test_rows_by_keys(visits, server):
    complete(server)
    complete(server)
    page = visits.open("requests")
    rows(page).nth(1).wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = rows(page).nth(1).get_by_role("button")
    assert focused.evaluate("node => node === document.activeElement")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    rows(page).first.locator(".request-details").wait_for()


def test_a_hidden_page_sends_nothing(visits, server):
    page = visits.open("requests")
    page.get_by_role("heading", name="Requests").wait_for()
    set_hidden(page, is_hidden=True)
    page.wait_for_timeout(1500)
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    page.wait_for_timeout(2500)
    assert [url for url in sent if "/v1/requests" in url] == []


def test_more_requests_than_are_shown(visits, server):
    page = visits.open("requests")
    page.get_by_text(re.compile(r"\d+ open|Send one")).wait_for()
    set_hidden(page, is_hidden=True)
    page.wait_for_timeout(1500)
    for _ in range(350):
        complete(server, model="nowhere")
    complete(server, model="chinese")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    set_hidden(page, is_hidden=False)
    rows(page).first.get_by_text("chinese").wait_for()
    assert len([url for url in sent if "/v1/requests" in url]) <= 3
    expect(rows(page)).to_have_count(100)


@pytest.mark.parametrize("width", [390, 360])
def test_a_phone(visits, server, width):
    complete(server, model="chinese")
    page = visits.open("requests", viewport={"width": width, "height": 640})
    rows(page).first.get_by_role("button").click()
    rows(page).first.locator(".request-details").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
