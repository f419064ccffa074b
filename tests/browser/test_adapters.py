"""The screen of adapters before a real server: details, every action, and hostile names."""

import contextlib
import http.client
import json
import re

import pytest
from playwright.sync_api import expect

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving

CHINESE, JAPANESE = (str(ADAPTER_PATHS[name]) for name in ("chinese", "japanese"))
HOSTILE = (
    "<img src=x onerror=hacked()>",
    "</script><script>hacked()</script>",
    "javascript:hacked()",
    "__proto__",
    "constructor",
    "%2e%2e%2fx",
    "a?b#c",
    "a//b",
    "x/pin",
    "zero\u200bwidth",
    " leading",
    "😀" * 20,
    "w" * 256,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


def load(server, name, path=CHINESE):
    status, body = server.post("/v1/adapters", {"name": name, "path": path, "replace": True})
    assert status == 201, body
    return body["digest"]


def row(page, name):
    return page.get_by_role("row").filter(has_text=name)


def fact(page, name):
    return page.locator(".adapter-facts dt", has_text=name).locator(
        "xpath=following-sibling::dd[1]"
    )


def test_the_list_shows_where_adapters_are_and_their_use(visits, server):
    load(server, "listed")
    server.post("/v1/adapters/listed/alias", {"alias": "other-name"})
    server.post("/v1/adapters/listed/pin", {"pinned": True})
    server.post("/v1/completions", {"model": "listed", "prompt": "a", "max_tokens": 2})
    page = visits.open("adapters?search=OTHER")
    row(page, "listed").wait_for()
    cells = row(page, "listed").get_by_role("gridcell").all_inner_texts()
    assert "pinned" in cells[0]
    assert "other-name" in cells[0]
    assert cells[1:3] == ["v1", "8"]
    assert cells[4] == "Device"
    assert cells[6] == "1"
    assert page.get_by_role("grid").get_attribute("aria-rowcount") == "2"
    page.get_by_text("more of rank 8 fit").wait_for()


def test_search_filters_and_order_stay_in_the_address(visits, server):
    load(server, "find-me")
    page = visits.open("adapters")
    row(page, "japanese").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("find")
    row(page, "japanese").wait_for(state="detached")
    row(page, "find-me").wait_for()
    page.get_by_label("Order").select_option("-size")
    page.reload()
    row(page, "find-me").wait_for()
    assert page.get_by_role("searchbox").input_value() == "find"
    assert "sort=-size" in page.url
    page.get_by_label("Tier").select_option("failed")
    page.get_by_text("No adapter matches").wait_for()


def test_details(visits, server):
    page = visits.open("adapters/chinese")
    digest = fact(page, "Digest").locator("code").inner_text()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert fact(page, "Base model").inner_text() == "capitals"
    modules = page.locator("section", has=page.get_by_role("heading", name="Modules"))
    assert modules.get_by_role("row").nth(1).inner_text().split() == ["k_proj", "8", "0–3"]
    page.get_by_text("rounded to").wait_for()
    server.post("/v1/completions", {"model": "chinese", "prompt": "a", "max_tokens": 2})
    use = page.locator("section", has=page.get_by_role("heading", name="Use", exact=True))
    use.get_by_role("cell", name="default").wait_for()


def test_an_adapter_that_is_not_there(visits):
    visits.expect_status(404)
    page = visits.open("adapters/nothing")
    page.get_by_text("no adapter of this name").wait_for()


def test_load_from_a_path(visits, server):
    visits.expect_status(422)
    page = visits.open("adapters")
    page.get_by_role("button", name="Load an adapter").click()
    form = page.locator("form.load-form")
    form.get_by_label("Name").fill("by-path")
    form.get_by_label("Source").fill("/nowhere")
    form.get_by_role("button", name="Load", exact=True).click()
    form.get_by_role("alert").wait_for()
    form.get_by_label("Source").fill(CHINESE)
    form.get_by_role("button", name="Dry run").click()
    form.get_by_role("region", name="Result").wait_for()
    form.get_by_text("24 of 24 tensors").wait_for()
    expect(row(page, "by-path")).to_have_count(0)
    form.get_by_role("button", name="Load", exact=True).click()
    form.get_by_text("Loaded:").wait_for()
    row(page, "by-path").wait_for()


def test_versions_pins_and_aliases(visits, server):
    first = load(server, "changing")
    page = visits.open("adapters/changing")
    page.get_by_role("button", name="Replace").first.click()
    form = page.locator("form.load-form")
    form.get_by_label("Source").fill(JAPANESE)
    form.get_by_role("button", name="Replace").click()
    form.get_by_text("v2").wait_for()
    digest = fact(page, "Digest").locator("code")
    page.wait_for_function(
        "([e, old]) => e.textContent !== old", arg=[digest.element_handle(), first]
    )
    page.get_by_role("button", name="Replace").first.click()
    page.get_by_role("button", name="Roll back").click()
    page.get_by_text("from version 1").wait_for()
    assert digest.inner_text() == first
    page.get_by_role("button", name="Pin", exact=True).first.click()
    page.get_by_role("button", name="Unpin").click()
    page.get_by_role("button", name="Pin", exact=True).first.wait_for()
    page.get_by_role("button", name="Add alias").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Alias").fill("second-name")
    dialog.get_by_role("button", name="Add alias").click()
    page.get_by_text("second-name").wait_for()
    page.get_by_role("button", name="Remove alias").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove alias").click()
    page.get_by_text("second-name").wait_for(state="detached")


@pytest.mark.parametrize("mode", ["Drain", "Immediate"])
def test_unload_says_what_ends(visits, server, mode):
    load(server, "leaving")
    server.post("/v1/adapters/leaving/alias", {"alias": "left"})
    page = visits.open("adapters/leaving")
    page.get_by_role("button", name="Unload").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("with its versions (1) and aliases (1)").wait_for()
    dialog.get_by_text("Requests that run with it now: 0").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    assert server.get("/v1/adapters/leaving")[0] == 200
    page.get_by_role("button", name="Unload").click()
    page.get_by_label(mode).check()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    page.get_by_role("heading", name="Adapters", level=1).wait_for()
    assert server.get("/v1/adapters/leaving")[0] == 404


@contextlib.contextmanager
def stream(server, model):
    """Events of a long completion, which runs as long as the context."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = {
        "model": model,
        "prompt": "The capital of",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()

    def events():
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                yield json.loads(data)

    try:
        yield events()
    finally:
        connection.close()


def test_a_stream_keeps_its_version_while_it_is_replaced(visits, server):
    old = load(server, "streamed", CHINESE)
    page = visits.open("adapters/streamed")
    page.get_by_role("button", name="Replace").first.click()
    form = page.locator("form.load-form")
    form.get_by_label("Source").fill(JAPANESE)
    with stream(server, "streamed") as events:
        first = next(events)
        form.get_by_role("button", name="Replace").click()
        form.get_by_text("v2").wait_for()
        prints = {first["system_fingerprint"], *(event["system_fingerprint"] for event in events)}
    assert len(prints) == 1
    assert old[:12] in prints.pop()
    _, now = server.post("/v1/completions", {"model": "streamed", "prompt": "a", "max_tokens": 1})
    assert old[:12] not in now["system_fingerprint"]


def wait_for_only(page, name):
    """Wait until the list has one row, of this name."""
    page.wait_for_function(
        "name => { const found = [...document.querySelectorAll('[role=gridcell] a bdi')];"
        " return found.length === 1 && found[0].textContent.replace('U+200B', '\u200b')"
        ".replace('U+20', ' ').replace('U+0020', ' ') === name; }",
        arg=name,
    )


def test_hostile_names_are_inert(visits, server):
    for name in HOSTILE:
        load(server, name)
    page = visits.open("adapters")
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
    page.evaluate("window.hacked = () => console.error('hacked'); null")
    for name in HOSTILE:
        page.get_by_role("searchbox").fill(name)
        wait_for_only(page, name)
        page.get_by_role("grid").focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", level=1).locator("bdi").wait_for()
        assert fact(page, "Base model").inner_text() == "capitals"
        page.go_back()
    for name in HOSTILE:
        page.goto(page.url.split("#")[0] + "#/adapters")
        row(page, "chinese").wait_for()
        page.get_by_role("searchbox").fill(name)
        wait_for_only(page, name)
        page.get_by_role("grid").focus()
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Unload").click()
        page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        page.get_by_role("searchbox").wait_for()
    assert not {card["name"] for card in json.loads(server.get("/v1/adapters")[1])["data"]} & {
        *HOSTILE
    }


def test_nothing_is_polled_while_the_page_is_hidden(visits):
    page = visits.open("adapters")
    row(page, "chinese").wait_for()
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(1000)  # requests that it sent may end
    seen = []
    page.on("request", lambda request: seen.append(request.url))
    page.wait_for_timeout(6_000)
    assert seen == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    with page.expect_response(re.compile("/v1/adapters")):
        pass


def test_the_list_stays_while_the_server_is_gone(visits):
    visits.expect_gone()
    page = visits.open("adapters")
    row(page, "chinese").wait_for()
    page.route("**/v1/adapters?limit*", lambda route: route.abort())
    page.locator(".state.bad").get_by_text("cannot be reached").wait_for()
    expect(row(page, "chinese")).to_have_count(1)  # old rows stay
    page.unroute("**/v1/adapters?limit*")
    page.get_by_role("button", name="Try again").click()
    page.locator(".state.bad").wait_for(state="detached")
    expect(row(page, "chinese")).to_have_count(1)


def test_without_adapters_the_page_names_the_command_that_loads_one(visits):
    page = visits.open()
    empty = {"object": "list", "data": [], "next": None, "total": 0}
    page.route("**/v1/adapters?limit*", lambda route: route.fulfill(json=empty))
    page.get_by_role("navigation").get_by_role("link", name="Adapters").click()
    page.get_by_text("loraplex adapters load NAME").wait_for()


def test_a_refusal_is_shown(visits):
    visits.expect_status(403)
    page = visits.open()
    refusal = {"error": {"message": "tenant 'x' may not list adapters", "code": "denied"}}
    page.route("**/v1/adapters?limit*", lambda route: route.fulfill(status=403, json=refusal))
    page.get_by_role("navigation").get_by_role("link", name="Adapters").click()
    page.get_by_role("alert").get_by_text("may not list adapters").wait_for()
