"""Settings in force, and the server's processes."""

import json
import os
import signal

import pytest
from playwright.sync_api import expect

from browser.conftest import settle
from loraplex.testing.running_server import serving

pytestmark = pytest.mark.xdist_group("settings")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("settings")) as running:
        yield running


def test_health_and_processes(visits, server):
    page = visits.open("settings")
    health = page.locator("section", has=page.get_by_role("heading", name="Health"))
    health.get_by_text("capitals ready, up").wait_for()
    page.get_by_role("heading", name="Processes").click()
    processes = page.get_by_role("region", name="Processes")
    for kind in ("server", "engine"):
        processes.get_by_role("rowheader", name=kind, exact=True).wait_for()
    row = processes.get_by_role("row", name="engine")
    expect(row).to_contain_text("MiB")
    pid = int(row.get_by_role("cell").nth(1).inner_text())
    visits.expect_status(503)
    os.kill(pid, signal.SIGKILL)
    health.get_by_text("kill: 1").wait_for()
    health.get_by_text("capitals ready, up").wait_for()


def test_what_takes_the_memory(visits, server):
    page = visits.open("settings")
    bar = page.get_by_role("img", name="What takes the memory?")
    expect(bar.locator(".swatch")).to_have_count(3)
    parts = bar.locator(".swatch").evaluate_all("all => all.map(e => e.title)")
    memory = json.loads(server.get("/v1/memory")[1])["capitals"]
    assert [part.split(":")[0] for part in parts] == ["Weights", "KV cache", "Adapters"]
    assert f"{memory['kv']['num_bytes'] >> 20} MiB" in parts[1]


def test_settings_are_found(visits, server):
    page = visits.open("settings")
    setting = page.locator(".settings li")
    setting.filter(has_text="http_port").first.wait_for()
    # At first those that are set.
    for text in setting.all_inner_texts():
        assert "flag" in text or "argument" in text or "variable" in text, text
    few = setting.count()
    page.get_by_label("only changed").uncheck()
    page.wait_for_function("() => document.querySelectorAll('.settings li').length > 100")
    page.wait_for_url("**all=1**")
    page.get_by_label("only changed").check()
    expect(setting).to_have_count(few)
    page.get_by_label("Search settings").fill("max_num_seqs")
    setting.filter(has_text="max_num_seqs").first.wait_for()
    page.wait_for_url("**search=max_num_seqs")


def test_the_list_is_copied(visits, server):
    page = visits.open("settings?search=http_port")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the list").click()
    page.get_by_text("Copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.splitlines()[0] == "[Server]"
    assert "# flag --http-port" in text


def test_a_phone(visits, server):
    page = visits.open("settings", viewport={"width": 390, "height": 844})
    page.locator(".settings li").first.wait_for()
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
