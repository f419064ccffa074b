"""The list of adapters stays small in the page and quick, however long it is."""

import types
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from loraplex.serving.model_memory import DeviceTier, HostTier, KVMemory, ModelMemory
from support.console_of_echo import console_of_echo

pytestmark = pytest.mark.xdist_group("many_adapters")

MAX_ROWS = 300
"""Maximum number of rows that may be in the page."""


@pytest.fixture(scope="module", params=[1_000, 10_000])
def total(request):
    return request.param


@pytest.fixture(scope="module")
def server(total):
    with console_of_echo([f"adapter-{number:05}" for number in range(total)]) as (backend, url):
        backend.model_memory = ModelMemory(
            max_num_seqs=64,
            max_num_batched_tokens=512,
            weights_bytes=1,
            kv=KVMemory(num_bytes=1, block_tokens=16, blocks=1, tokens=16),
            device=DeviceTier(num_bytes=100, page_bytes=1, pages=100),
            host=HostTier(num_bytes=100),
        )
        yield types.SimpleNamespace(url=url, http_port=urlsplit(url).port)


def wait_for_current(page, index, row=None):
    """Wait until the current row is this adapter's, loaded and in view."""
    page.wait_for_function(
        "([index, place]) => {"
        " const row = document.querySelector('.grid-row.current');"
        " if (row?.getAttribute('aria-rowindex') !== String(place + 2)) return false;"
        " const grid = document.querySelector('[role=grid]').getBoundingClientRect();"
        " const { top, bottom } = row.getBoundingClientRect();"
        " return row.getAttribute('aria-busy') === 'false' && top >= grid.top"
        " && bottom <= grid.bottom + 1"
        " && row.textContent.includes(`adapter-${String(index).padStart(5, '0')}`); }",
        arg=[index, index if row is None else row],
    )


def num_rows(page):
    return page.get_by_role("grid").get_by_role("row").count()


def test_keys_reach_every_row(visits, total):
    page = visits.open("adapters")
    grid = page.get_by_role("grid")
    expect(grid).to_have_attribute("aria-rowcount", str(total + 1))
    grid.focus()
    page.keyboard.press("End")
    wait_for_current(page, total - 1)
    page.keyboard.press("ArrowUp")
    wait_for_current(page, total - 2)
    page.keyboard.press("Home")
    wait_for_current(page, 0)
    page.keyboard.press("PageDown")
    page.wait_for_function(
        "() => Number(document.querySelector('.grid-row.current').ariaRowIndex) > 6"
    )
    page.keyboard.press("PageUp")
    wait_for_current(page, 0)
    page.get_by_role("heading", level=1).click()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    wait_for_current(page, 1)
    active = grid.get_attribute("aria-activedescendant")
    expect(page.locator(f"[id='{active}']")).to_have_attribute("aria-rowindex", "3")
    assert num_rows(page) < MAX_ROWS


def test_scrolling_loads_what_is_seen(visits, total):
    page = visits.open("adapters")
    page.get_by_text("adapter-00000").wait_for()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.get_by_role("grid").evaluate("(grid, top) => { grid.scrollTop = top; }", total // 2 * 40)
    page.get_by_text(f"adapter-{total // 2:05}").wait_for()
    assert num_rows(page) < MAX_ROWS
    assert len([url for url in requests if "/v1/adapters" in url]) < 10


def test_search_is_quick(visits, total):
    page = visits.open("adapters")
    page.get_by_text("adapter-00000").wait_for()
    wanted = f"{total - 1:05}"
    milliseconds = page.evaluate(
        """async wanted => {
            const search = document.querySelector('[type=search]');
            const rows = () => document.querySelector('[role=grid]')?.ariaRowCount;
            const took = [];
            for (const [text, count] of [[wanted, '2'], ['', null]]) {
                const start = performance.now();
                search.value = text;
                search.dispatchEvent(new Event('input', { bubbles: true }));
                while (count ? rows() !== count : rows() === '2')
                    await new Promise(requestAnimationFrame);
                took.push(performance.now() - start);
            }
            return took;
        }""",
        wanted,
    )
    # 50 ms and the pause after typing on an idle machine; a busy one is slower.
    assert max(milliseconds) < 2000, milliseconds


def test_what_is_known_is_not_sent_again(visits):
    page = visits.open("adapters")
    page.get_by_text("adapter-00000").wait_for()
    with page.expect_response(lambda response: "offset=0" in response.url) as polled:
        pass
    assert polled.value.status == 304


def test_what_is_scrolled_past_is_not_loaded(visits, total):
    page = visits.open("adapters")
    page.get_by_text("adapter-00000").wait_for()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.get_by_role("grid").evaluate(
        # Within one pause of loading, however slow the machine is.
        "(grid, total) => { for (let row = 0; row < total; row += 50)"
        " { grid.scrollTop = row * 40; grid.dispatchEvent(new Event('scroll')); } }",
        total,
    )
    page.get_by_role("searchbox").fill(f"{total - 1:05}")
    page.locator("h1 .total").get_by_text("1", exact=True).wait_for()
    wait_for_current(page, total - 1, row=0)
    assert len([url for url in requests if "offset=" in url]) < 6
