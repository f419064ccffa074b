"""Signing in: the key's way, what a tenant sees, and keys that are wrong or revoked."""

import pytest
from playwright.sync_api import expect

from loraplex.serving.access.key_file_changes import revoke_key
from loraplex.testing.running_server import serving

pytestmark = pytest.mark.xdist_group("sign_in")


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    with serving(tmp_path_factory.mktemp("state"), "--api-keys-file", str(keys.path)) as running:
        yield running


def test_without_a_key_the_form_is_all(visits):
    visits.expect_status(401)
    page = visits.open()
    page.get_by_role("heading", name="Sign in").wait_for()
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(0)


def test_a_wrong_key_is_refused(visits):
    visits.expect_status(401)
    page = visits.open()
    page.get_by_label("API key").fill("lp-wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").get_by_text("does not know this key").wait_for()


def test_a_tenant_sees_no_screens_of_operators(visits, keys):
    page = visits.open(key=keys.of["acme"])
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_text("Signed in as acme").wait_for()
    page.keyboard.press("Escape")
    links = page.get_by_role("navigation").get_by_role("link")
    expect(links.locator(".long")).to_have_text(["Playground", "Adapters", "Requests"])
    page.goto(page.url.split("#")[0] + "#/settings")
    page.get_by_role("heading", name="Playground").wait_for()


def sign_out(page):
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("button", name="Sign out").click()


def test_the_key_is_stored_only_by_choice(visits, keys):
    key = keys.of["ops"]
    page = visits.open(key=key)
    page.get_by_role("link", name="Server").click()
    page.get_by_role("heading", level=1, name="Server").wait_for()
    stored = (
        "JSON.stringify([{...localStorage}, {...sessionStorage}, location.href, document.cookie])"
    )
    assert key not in page.evaluate(stored)
    sign_out(page)
    page.get_by_label("API key").fill(key)
    page.get_by_label("Keep it").check()
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("navigation").get_by_role("link", name="Live").wait_for()
    page.reload()
    page.get_by_role("navigation").get_by_role("link", name="Live").wait_for()
    assert key not in page.evaluate("JSON.stringify([{...localStorage}, location.href])")
    sign_out(page)
    page.get_by_label("API key").wait_for()
    assert key not in page.evaluate(stored)


def test_a_revoked_key_leads_back_to_the_form(visits, keys):
    page = visits.open("adapters", key=keys.of["reader"])
    page.get_by_role("navigation").get_by_role("link", name="Requests").wait_for()
    revoke_key(keys.path, keys.ids["reader"])
    page.reload()
    page.get_by_role("heading", name="Sign in").wait_for()
