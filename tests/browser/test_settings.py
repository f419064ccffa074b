"""Settings in force, and the server's processes."""

import os
import signal


def test_processes(visits, server):
    page = visits.open("settings")
    processes = page.get_by_role("region", name="Processes")
    for kind in ("server", "engine"):
        processes.get_by_role("rowheader", name=kind, exact=True).wait_for()
    row = processes.get_by_role("row", name="engine")
    assert "MB" in row.inner_text()
    pid = int(row.get_by_role("cell").nth(1).inner_text())
    engines = page.get_by_role("region", name="Engines")
    engines.get_by_text("ready", exact=True).wait_for()
    visits.expect_status(503)
    os.kill(pid, signal.SIGKILL)
    engines.get_by_text("kill: 1").wait_for()
    engines.get_by_text("ready", exact=True).wait_for()


def test_settings_are_found(visits, server):
    page = visits.open("settings")
    setting = page.locator(".settings li")
    setting.filter(has_text="http_port").first.wait_for()
    everything = setting.count()
    assert everything > 100
    page.get_by_label("Search settings").fill("http_port")
    page.get_by_text("1 settings").wait_for()
    assert "flag --http-port" in setting.first.inner_text()
    assert page.url.endswith("search=http_port")
    page.get_by_label("Search settings").fill("")
    page.get_by_label("Source").select_option("set")
    page.wait_for_function(f"document.querySelectorAll('.settings li').length < {everything}")
    for text in setting.all_inner_texts():
        assert "flag" in text or "argument" in text or "variable" in text, text


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
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
