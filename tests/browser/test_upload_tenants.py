"""Uploads of tenants: the names that they may manage, and what others see of them."""

import shutil

import httpx
import pytest
from playwright.sync_api import expect

from browser.test_upload import drop, result
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    flags = ["--uploads", "--api-keys-file", str(keys.path)]
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(ADAPTER_PATHS["chinese"], tmp_path / "zh")


def test_a_name_without_the_right_can_be_changed(visits, server, keys, folder):
    page = visits.open("adapters?add=1", key=keys.of["acme"])
    visits.expect_status(403)
    drop(page, folder)
    alert = page.locator(".upload").get_by_role("alert")
    alert.wait_for()
    assert "may not manage" in alert.inner_text()
    panel = page.locator(".upload")
    panel.get_by_label("Name").fill("acme-zh")
    panel.get_by_role("button", name="Dry run again").click()
    result(page).get_by_text("It can be loaded.").wait_for()
    panel.get_by_label("Name").fill("acme-other")
    panel.get_by_text("The name has changed").wait_for()
    assert panel.get_by_role("button", name="Load", exact=True).is_disabled()
    panel.get_by_label("Name").fill("acme-zh")
    panel.get_by_role("button", name="Load", exact=True).click()
    panel.get_by_text("version 1 is loaded").wait_for()
    other = visits.open("adapters", key=keys.of["umbrella"])
    other.get_by_text("japanese").first.wait_for()
    assert "acme" not in other.locator("main").inner_text()


def test_without_the_right_there_is_no_panel(visits, keys):
    page = visits.open("adapters?add=1", key=keys.of["reader"])
    page.wait_for_timeout(500)
    expect(page.locator(".upload")).to_have_count(0)


def test_an_upload_is_its_tenants(visits, server, keys, folder):
    page = visits.open("adapters?add=1", key=keys.of["ops"])
    with page.expect_response("**/v1/uploads") as begun:
        drop(page, folder)
    result(page)
    url = f"{server.url}/v1/uploads/{begun.value.json()['id']}"
    for tenant, status in (("ops", 200), ("acme", 404), ("reader", 403)):
        headers = {"authorization": f"Bearer {keys.of[tenant]}"}
        assert httpx.get(url, headers=headers, timeout=60).status_code == status
