"""Uploads of tenants: the names that they may manage, and what others see of them."""

import shutil

import httpx
import pytest
from playwright.sync_api import expect

from browser.conftest import settle
from browser.test_load import drop, result
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving

pytestmark = pytest.mark.xdist_group("load_of_tenants")


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
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("alert").get_by_text("may not manage").wait_for()
    dialog.locator(".load-name").fill("acme-zh")
    dialog.locator(".load-name").press("Tab")
    result(page).get_by_text("Can be loaded").wait_for()
    dialog.get_by_role("button", name="Load as acme-zh v1").click()
    page.get_by_text("version 1 is loaded").wait_for()
    other = visits.open("adapters", key=keys.of["umbrella"])
    other.get_by_text("japanese").first.wait_for()
    settle(other)
    expect(other.locator("main")).not_to_contain_text("acme")


def test_without_the_right_there_is_no_dialog(visits, keys):
    page = visits.open("adapters?add=1", key=keys.of["reader"])
    page.get_by_role("row").nth(1).wait_for()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_an_upload_is_its_tenants(visits, server, keys, folder):
    page = visits.open("adapters?add=1", key=keys.of["ops"])
    with page.expect_response("**/v1/uploads") as begun:
        drop(page, folder)
    result(page)
    url = f"{server.url}/v1/uploads/{begun.value.json()['id']}"
    for tenant, status in (("ops", 200), ("acme", 404), ("reader", 403)):
        headers = {"authorization": f"Bearer {keys.of[tenant]}"}
        assert httpx.get(url, headers=headers, timeout=60).status_code == status
