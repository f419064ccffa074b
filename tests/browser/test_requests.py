"""Requests: the newest ones, what runs, filters and details."""

import json
import re
import urllib.request

import pytest
from playwright.sync_api import expect

from browser.conftest import sent_meanwhile, settle
from loraplex.testing.running_server import MODEL, serving
from support.engine_kills import HELD_ENGINE_FLAGS, held_engine
from support.listed_requests import complete, rows

pytestmark = pytest.mark.xdist_group("requests")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("requests"), *HELD_ENGINE_FLAGS) as running:
        yield running


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
    expect(row.locator(".phases")).to_have_attribute("aria-label", re.compile("ms.*ms"))
    row.get_by_role("button").first.click()
    details = row.locator(".request-details")
    details.get_by_text("the test").wait_for()
    details.get_by_text("HTTP POST /v1/completions".replace("HTTP", "http")).wait_for()
    details.get_by_text("length", exact=True).wait_for()
    for name in ("Prefill", "Decode"):
        details.get_by_text(name, exact=True).wait_for()


def test_what_comes_while_one_looks(visits, server):
    page = visits.open("requests?adapter=japanese", has_clock=True)
    page.get_by_text("No request matches the filters.").wait_for()
    complete(server, model="japanese")
    rows(page).first.wait_for()
    page.get_by_role("button", name="Pause").click()
    complete(server, model="japanese")
    assert not [url for url in sent_meanwhile(page, 12) if "/v1/requests" in url]
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
    page.get_by_role("button", name="Status").click()
    page.get_by_role("button", name="failed").click()
    rows(page).get_by_text("404").first.wait_for()
    expect(rows(page).filter(has_text="base model")).to_have_count(0)
    page.wait_for_url("**#/requests?status=error")
    page.reload()
    page.locator(".chosen").get_by_text("failed").wait_for()
    page.get_by_role("button", name="Adapter", exact=True).click()
    page.get_by_label("Adapter", exact=True).fill("japa")
    page.locator(".filter-values").get_by_text("japanese").click()
    page.wait_for_url("**#/requests?status=error&adapter=japanese")
    page.get_by_role("button", name="Remove the filter Status").click()
    page.wait_for_url("**#/requests?adapter=japanese")


def test_a_failed_request_shows_its_message_and_its_adapter_is_a_link(visits, server):
    assert complete(server, model="nowhere") == 404
    complete(server, model="chinese")
    status, _ = server.post("/v1/adapters", {"name": "absent", "path": "/nowhere/absent"})
    assert status >= 400
    page = visits.open("requests")
    message = rows(page).filter(has_text="404").locator(".request-message").first
    expect(message).to_contain_text("nowhere")
    row = rows(page).filter(has_text="chinese").first
    row.get_by_role("link", name="chinese").click()
    page.get_by_role("heading", level=1, name="chinese").wait_for()
    page.go_back()
    # A route of adapters: its subject is a link, too.
    page.get_by_role("button", name="Kind").click()
    page.locator(".filter-values").get_by_text("adapter", exact=True).click()
    rows(page).filter(has_text="absent").get_by_role("link", name="absent").wait_for()
    expect(rows(page).filter(has_text="base model")).to_have_count(0)


def test_every_shade_is_in_the_legend(visits, server):
    complete(server, model="chinese", ignore_eos=True)
    page = visits.open("requests?adapter=chinese")
    rows(page).first.wait_for()
    settle(page)
    shades = "[...document.querySelectorAll('{} .phase')].map(e => e.className)"
    shown = page.evaluate(shades.format(".requests"))
    assert "phase begin" in shown
    assert set(shown) <= set(page.evaluate(shades.format(".phase-key")))


def test_rows_by_keys(visits, server):
    complete(server)
    complete(server)
    page = visits.open("requests")
    rows(page).nth(1).wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(rows(page).nth(1).get_by_role("button").first).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    rows(page).first.locator(".request-details").wait_for()


def test_a_hidden_page_sends_nothing(visits, server):
    page = visits.open("requests", has_clock=True)
    settle(page)
    set_hidden(page, is_hidden=True)
    assert [url for url in sent_meanwhile(page, 12) if "/v1/requests" in url] == []


def test_more_requests_than_are_shown(visits, server):
    page = visits.open("requests")
    page.get_by_text(re.compile(r"\d+ open|Send one")).first.wait_for()
    settle(page)
    set_hidden(page, is_hidden=True)
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
    rows(page).first.get_by_role("button").first.click()
    rows(page).first.locator(".request-details").wait_for()
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
