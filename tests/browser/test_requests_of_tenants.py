"""Requests on a server with keys: a tenant sees its own, an operator chooses."""

import pytest
from playwright.sync_api import expect

from loraplex.testing.running_server import serving
from support.listed_requests import complete, rows

pytestmark = pytest.mark.xdist_group("requests_of_tenants")


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    state = tmp_path_factory.mktemp("requests")
    with serving(state, "--api-keys-file", str(keys.path)) as running:
        yield running


def test_names_of_another_tenant_are_nowhere(visits, server, keys):
    acme, umbrella = keys.of["acme"], keys.of["umbrella"]
    assert complete(server, model="chinese", key=acme) == 200
    assert complete(server, model="japanese", key=umbrella) == 200
    assert complete(server, model="nothing-like-it", key=acme) == 404
    page = visits.open(key=acme)
    bodies = []
    page.on("response", lambda one: "/v1/requests" in one.url and bodies.append(one))
    page.get_by_role("link", name="Requests").click()
    rows(page).filter(has_text="200").get_by_text("chinese").first.wait_for()
    rows(page).filter(has_text="404").first.wait_for()
    expect(page.get_by_role("button", name="Tenant")).to_have_count(0)
    expect(page.get_by_role("link", name="Server")).to_have_count(0)
    texts = [page.content(), *(body.text() for body in bodies)]
    assert len(texts) > 1
    assert not any("umbrella" in text or "japanese" in text for text in texts)


def test_an_operator_chooses_a_tenant(visits, server, keys):
    complete(server, model="chinese", key=keys.of["acme"])
    complete(server, model="japanese", key=keys.of["umbrella"])
    page = visits.open("requests", key=keys.of["ops"])
    rows(page).filter(has_text="umbrella").first.wait_for()
    rows(page).filter(has_text="acme").first.wait_for()
    page.get_by_role("button", name="Tenant").click()
    page.get_by_label("Tenant").fill("acme")
    page.keyboard.press("Enter")
    page.wait_for_url("**tenant=acme")
    rows(page).filter(has_text="acme").first.wait_for()
    expect(rows(page).filter(has_text="umbrella")).to_have_count(0)


def test_hostile_texts_are_inert(visits, server, keys):
    hostile = "<img src=x onerror=alert(1)>"
    complete(server, key=keys.of["acme"], user=hostile, agent=hostile)
    page = visits.open("requests?tenant=acme", key=keys.of["ops"])
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    row = rows(page).filter(has_text="base model").first
    row.get_by_role("button").first.click()
    row.get_by_text(hostile).wait_for()
    expect(page.locator("main img")).to_have_count(0)
