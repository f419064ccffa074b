"""The screen of adapters before a real server: details, every action, and hostile names."""

import contextlib
import http.client
import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from browser.conftest import sent_meanwhile, settle
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving

pytestmark = pytest.mark.xdist_group("adapters")

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


def digest_of(server, name):
    return json.loads(server.get(f"/v1/adapters/{name}")[1])["digest"]


def open_menu(page, action):
    """Choose an action of the adapter's page that its menu has."""
    page.get_by_role("button", name="Actions", exact=True).click()
    page.locator(".popover:popover-open").get_by_role("button", name=action).click()


def test_the_list_shows_where_adapters_are_and_their_use(visits, server):
    load(server, "listed")
    server.post("/v1/adapters/listed/alias", {"alias": "other-name"})
    server.post("/v1/adapters/listed/pin", {"pinned": True})
    server.post("/v1/completions", {"model": "listed", "prompt": "a", "max_tokens": 2})
    page = visits.open("adapters?search=OTHER")
    cells = row(page, "listed").get_by_role("gridcell")
    expect(cells.nth(1)).to_contain_text("pinned")
    expect(cells.nth(1)).to_contain_text("+1 alias")
    for index, text in ((2, "v1"), (3, "8"), (5, "Device"), (7, "1")):
        expect(cells.nth(index)).to_have_text(text)
    expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "2")
    page.get_by_text("more of rank 8").wait_for()


def test_search_filters_and_order_stay_in_the_address(visits, server):
    load(server, "find-me")
    page = visits.open("adapters")
    row(page, "japanese").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("find")
    expect(row(page, "japanese")).to_have_count(0)
    row(page, "find-me").wait_for()
    page.get_by_role("columnheader", name="Size").get_by_role("button").click()
    page.wait_for_url("**sort=-size**")
    page.reload()
    row(page, "find-me").wait_for()
    expect(page.get_by_role("searchbox")).to_have_value("find")
    assert "sort=-size" in page.url
    page.get_by_label("Where").select_option("failed")
    page.get_by_text("No adapter matches").wait_for()
    page.get_by_role("button", name="Clear filters").click()
    row(page, "japanese").wait_for()


def test_details(visits, server):
    page = visits.open("adapters/chinese")
    expect(fact(page, "Base")).to_have_text("capitals")
    expect(fact(page, "Rank")).to_have_text("8 · 3 modules × 4 layers")
    digest = digest_of(server, "chinese")
    expect(fact(page, "Digest").locator("code")).to_have_text(f"{digest[:8]}…{digest[-8:]}")
    page.get_by_text("24 tensors, all applied").click()
    cells = page.get_by_role("table").get_by_role("row").nth(1).get_by_role("cell")
    expect(cells).to_have_text(["k_proj", "8", "0–3"])


def test_traffic(visits, server):
    server.post("/v1/completions", {"model": "chinese", "prompt": "a", "max_tokens": 2})
    page = visits.open("adapters/chinese")
    page.get_by_role("link", name="Traffic").click()
    page.get_by_role("cell", name="default").wait_for()
    bars = page.get_by_role("img", name=re.compile("The last 60 minutes: [1-9]"))
    bars.locator("rect.of-accent").first.wait_for(state="attached")
    page.get_by_role("link", name="Its requests").click()
    page.get_by_role("heading", level=1, name="Requests").wait_for()
    page.wait_for_url("**#/requests?adapter=chinese")


def test_an_adapter_that_is_not_there(visits):
    visits.expect_status(404)
    page = visits.open("adapters/nothing")
    page.get_by_text("no adapter of this name").wait_for()


def replace(page, path):
    """Replace the adapter of the page by one of a path, and close the dialog."""
    page.get_by_role("button", name="Replace").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Path or address").click()
    dialog.locator(".source-path").fill(path)
    dialog.locator(".source-path").press("Enter")
    dialog.get_by_text("Can be loaded").wait_for()
    dialog.get_by_role("button", name=re.compile(r"^Load as \S+ v\d+$")).click()
    dialog.get_by_text("is loaded").wait_for()
    dialog.get_by_role("button", name="Close").click()


def test_versions_pins_and_aliases(visits, server):
    first = load(server, "changing")
    page = visits.open("adapters/changing")
    replace(page, JAPANESE)
    page.get_by_role("heading", level=1).get_by_text("v2").wait_for()
    assert digest_of(server, "changing") != first
    open_menu(page, "Roll back")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("v1 becomes v3. Running requests (0) end with v2.").wait_for()
    dialog.get_by_role("button", name="Make v1 current").click()
    page.get_by_role("heading", level=1).get_by_text("v3").wait_for()
    assert digest_of(server, "changing") == first
    page.get_by_role("link", name="Versions 3").click()
    page.get_by_text("from version 1").wait_for()
    page.get_by_role("button", name="Pin", exact=True).first.click()
    page.get_by_role("button", name="Unpin").click()
    page.get_by_role("button", name="Pin", exact=True).first.wait_for()
    open_menu(page, "Add alias")
    dialog.get_by_label("Alias").fill("second-name")
    dialog.get_by_role("button", name="Add alias").click()
    page.get_by_role("link", name="Overview").click()
    fact(page, "Aliases").get_by_text("second-name").wait_for()
    page.get_by_role("button", name="Remove alias").click()
    dialog.get_by_role("button", name="Remove alias").click()
    expect(page.get_by_text("second-name")).to_have_count(0)


def test_two_versions_show_what_changed_and_are_tried_together(visits, server):
    load(server, "two-versions")
    load(server, "two-versions", JAPANESE)
    page = visits.open("adapters/two-versions?tab=versions")
    boxes = page.locator("table.versions").get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("heading", name="Compare v1 → v2").wait_for()
    table = page.locator("table.version-changes")
    # Both have the same ranks, modules, types and size.
    expect(table.locator("tbody th")).to_have_text(["Source"])
    expect(table.locator("tbody td")).to_have_text([CHINESE, JAPANESE])
    page.get_by_role("button", name="Try both").click()
    card = json.loads(server.get("/v1/adapters/two-versions")[1])
    heads = page.locator(".head")
    expect(heads).to_have_count(2)
    expect(heads).to_contain_text([one["digest"][:4] for one in reversed(card["versions"])])


@pytest.mark.parametrize("mode", ["Drain", "Immediate"])
def test_unload_says_what_ends(visits, server, mode):
    load(server, "leaving")
    server.post("/v1/adapters/leaving/alias", {"alias": "left"})
    page = visits.open("adapters/leaving")
    open_menu(page, "Unload")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("with its versions (1) and aliases (1)").wait_for()
    dialog.get_by_text("Requests that run with it now: 0").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert server.get("/v1/adapters/leaving")[0] == 200
    open_menu(page, "Unload")
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
    page.get_by_role("heading", level=1).wait_for()
    with stream(server, "streamed") as events:
        first = next(events)
        replace(page, JAPANESE)
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
        expect(fact(page, "Base")).to_have_text("capitals")
        open_menu(page, "Unload")
        page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        page.get_by_role("searchbox").wait_for()
        expect(page.get_by_role("dialog")).to_have_count(0)
    assert not {card["name"] for card in json.loads(server.get("/v1/adapters")[1])["data"]} & {
        *HOSTILE
    }


def test_nothing_is_polled_while_the_page_is_hidden(visits):
    page = visits.open("adapters", has_clock=True)
    row(page, "chinese").wait_for()
    settle(page)
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert sent_meanwhile(page, 12) == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    with page.expect_response(re.compile("/v1/adapters")):
        pass


def test_the_list_stays_while_the_server_is_gone(visits):
    visits.expect_gone()
    page = visits.open("adapters")
    row(page, "chinese").wait_for()
    page.route("**/v1/adapters?limit*", lambda route: route.abort())
    page.locator(".state.bad").get_by_text("cannot be reached").first.wait_for()
    expect(row(page, "chinese")).to_have_count(1)  # old rows stay
    page.unroute("**/v1/adapters?limit*")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".state.bad")).to_have_count(0)
    expect(row(page, "chinese")).to_have_count(1)


def test_names_stand_first_and_rows_have_one_height(visits, server):
    load(server, "same-look")  # the content of `chinese` under another name
    page = visits.open("adapters?search=chinese")
    row(page, "chinese").first.wait_for()
    settle(page)
    grid = page.get_by_role("grid")
    cells = row(page, "chinese").first.get_by_role("gridcell")
    middles = [cells.nth(i).evaluate(MIDDLE) for i in range(11)]
    assert max(middles) - min(middles) <= 1
    head = grid.locator(".grid-head").evaluate("e => e.offsetHeight")
    assert head <= 42
    num_rows = int(grid.get_attribute("aria-rowcount")) - 1
    # Its border is 2 px.
    assert grid.evaluate("e => e.offsetHeight") == head + 40 * num_rows + 2
    # The name is the first text of its row.
    expect(row(page, "chinese").first).to_have_text(re.compile(r"^\s*chinese"))
    current = page.locator(".grid-body .current")
    unmarked = current.evaluate("e => getComputedStyle(e).backgroundColor")
    grid.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    expect(current).not_to_have_css("background-color", unmarked)


MIDDLE = """cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const { top, bottom } = range.getBoundingClientRect();
  const all = cell.getBoundingClientRect();
  return bottom > top ? (top + bottom) / 2 : (all.top + all.bottom) / 2;
}"""


def test_look_alikes_have_digits_after_their_names(visits, server):
    listed = json.loads(server.get("/v1/adapters?limit=1000")[1])
    first, *_ = [one for one in listed["data"] if one["name"] == "chinese"]
    # The same colour and texture, and other content.
    twin = first["digest"][:8] + "f" * 56
    other = {**first, "name": "twin", "digest": twin}
    alone = {**first, "name": "alone", "digest": "00000001" + "0" * 56, "pinned": False}
    page = visits.open()
    page.route(
        "**/v1/adapters?limit*",
        lambda route: route.fulfill(json={**listed, "data": [first, other, alone], "total": 3}),
    )
    page.get_by_role("link", name="Adapters").click()
    row(page, "twin").wait_for()
    digits = first["digest"][:4]
    expect(page.locator(".grid-body .name-cell")).to_have_text(
        [*(re.compile(rf"^\s*{name}\s*{digits}") for name in ("chinese", "twin")), "alone"]
    )


def test_the_bar_of_pages_has_the_capacity_as_its_width(visits, server):
    page = visits.open("adapters")
    memory = json.loads(server.get("/v1/memory")[1])["capitals"]["device"]
    page.get_by_text(f"{memory['pages_used']:,} of {memory['pages']:,} pages").wait_for()
    settle(page)
    whole = page.locator(".capacity").evaluate("e => e.clientWidth")
    used = page.locator(".capacity-used").evaluate("e => e.getBoundingClientRect().width")
    wanted = max(2, whole * memory["pages_used"] / memory["pages"])
    assert used == pytest.approx(wanted, abs=0.5)


def test_notes_are_not_amber_and_another_base_is(visits, server):
    page = visits.open("adapters?search=japanese")
    row(page, "japanese").wait_for()
    expect(page.locator("main .warn, main .warning")).to_have_count(0)
    page.goto(page.url.split("#")[0] + "#/adapters/japanese")
    fact(page, "Size").get_by_text("ⓘ").wait_for()
    expect(page.locator("main .warn, main .warning")).to_have_count(0)

    def of_another_base(route):
        body = route.fetch().json()
        # The page reads the code of a warning, not its words.
        other = {
            "warnings": ["base", "1 tensor: left out"],
            "warning_codes": ["other_base", "other"],
        }
        route.fulfill(json={**body, "declared_base": "qwen3", **other})

    page.route("**/v1/adapters/japanese", of_another_base)
    page.reload()
    page.get_by_role("heading", level=1).wait_for()
    warnings = page.locator("main .warning")
    expect(warnings).to_contain_text(
        ["Trained on qwen3, this server runs capitals", "1 tensor: left out"]
    )


def select(page, *names):
    for name in names:
        row(page, name).get_by_role("checkbox").click()


def test_of_several_that_are_unloaded_the_refused_one_stays_selected(visits, server):
    visits.expect_status(409)
    for name in ("bulk-a", "bulk-b", "bulk-c"):
        load(server, name)
    page = visits.open("adapters?search=bulk")
    row(page, "bulk-c").wait_for()

    def refuse(route):
        error = {"error": {"message": "bulk-b is in use elsewhere", "code": "conflict"}}
        route.fulfill(status=409, json=error)

    page.route("**/v1/adapters/bulk-b", refuse)
    page.get_by_role("grid").focus()
    page.keyboard.press("x")
    page.get_by_text("1 selected").wait_for()
    row(page, "bulk-c").click(modifiers=["Shift"], position={"x": 120, "y": 20})
    page.get_by_text("3 selected").wait_for()
    page.locator(".picked").get_by_role("button", name="Unload").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("li")).to_contain_text(["bulk-a", "bulk-b", "bulk-c"])
    dialog.get_by_role("button", name="Unload 3").click()
    dialog.get_by_text("bulk-b is in use elsewhere").wait_for()
    expect(dialog.get_by_text("✓")).to_have_count(2)
    dialog.get_by_role("button", name="Close").click()
    page.get_by_text("1 selected").wait_for()
    expect(row(page, "bulk-a")).to_have_count(0)
    expect(page.locator("[role=row][aria-selected=true]")).to_have_text(re.compile("bulk-b"))
    assert server.get("/v1/adapters/bulk-a")[0] == 404
    assert server.get("/v1/adapters/bulk-b")[0] == 200


def test_selected_ones_are_compared_and_pinned(visits, server):
    page = visits.open("adapters")
    row(page, "japanese").wait_for()
    select(page, "chinese", "japanese")
    page.locator(".picked").get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Pin 2").click()
    expect(page.get_by_role("dialog").get_by_text("✓")).to_have_count(2)
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    row(page, "chinese").get_by_text("pinned").wait_for()
    select(page, "chinese", "japanese")
    page.locator(".picked").get_by_role("button", name="Compare").click()
    heads = page.locator(".head")
    expect(heads).to_have_count(3)
    expect(heads).to_contain_text(["Base", "chinese", "japanese"])


def test_a_row_has_a_menu(visits, server):
    page = visits.open("adapters")
    row(page, "japanese").wait_for()
    page.get_by_role("grid").focus()
    page.keyboard.press("m")
    menu = page.locator(".popover:popover-open")
    menu.get_by_role("button", name="Compare with base").wait_for()
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    page.get_by_role("button", name="Actions: japanese").click()
    menu.get_by_role("button", name="Use it").click()
    page.get_by_role("heading", name="tritonclient").wait_for()


SNIPPETS = {"curl": "curl", "openai": "OpenAI", "tritonclient": "tritonclient"}
"""A word of each program."""


@pytest.mark.parametrize("kind", SNIPPETS)
def test_each_snippet_runs_as_it_is(visits, server, kind, tmp_path):
    page = visits.open("adapters/chinese")
    page.locator("[aria-label='Use it']").get_by_role("button", name=kind, exact=True).click()
    expect(page.locator(".snippet pre")).to_contain_text(SNIPPETS[kind])
    text = page.locator(".snippet pre").inner_text()
    assert "chinese" in text
    command = ["bash", "-c", text] if kind == "curl" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert len(done.stdout.strip()) > 0


def test_commands_that_serve_it_elsewhere(visits, server):
    load(server, "odd name")
    page = visits.open("adapters/odd%20name?tab=use")
    texts = page.locator(".snippet pre")
    expect(texts.last).to_contain_text("loraplex adapters load")
    vllm, own = texts.all_inner_texts()[-2:]
    assert "--enable-lora --lora-modules" in vllm
    assert f"'odd name={CHINESE}'" in vllm
    assert f"loraplex adapters load 'odd name' {CHINESE}" in own


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
