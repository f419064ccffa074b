"""What tenants, readers and operators see of adapters, and what they may do."""

import json
import urllib.request

import pytest
from playwright.sync_api import expect

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import serving

pytestmark = pytest.mark.xdist_group("adapters_of_tenants")

CHINESE = str(ADAPTER_PATHS["chinese"])


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    demo = str(ADAPTER_PATHS["chinese"].parent)
    flags = ("--api-keys-file", str(keys.path), "--allowed-adapter-roots", demo)
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        for tenant in ("acme", "umbrella"):
            name = f"{tenant}-own"
            post(running, keys.of[tenant], "/v1/adapters", name=name, path=CHINESE)
            post(running, keys.of[tenant], "/v1/completions", model=name, prompt="a", max_tokens=2)
        post(running, keys.of["acme"], "/v1/completions", model="chinese", prompt="a", max_tokens=2)
        yield running


def post(server, key, path, /, **body):
    request = urllib.request.Request(
        f"{server.url}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def open_adapters(visits, key, path="adapters"):
    page = visits.open(path, key=key)
    page.get_by_role("heading", level=1).wait_for()
    return page


def test_a_tenant_sees_its_own_and_what_it_may_list(visits, keys):
    responses = []
    page = visits.open("adapters", key=keys.of["acme"])
    page.on("response", lambda response: responses.append(response.text()))
    page.reload()
    page.get_by_label("API key").fill(keys.of["acme"])
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("row").filter(has_text="acme-own").wait_for()
    expect(page.locator("h1 .total")).to_have_text("2")
    expect(page.get_by_text("of rank")).to_have_count(0)  # memory is for operators
    for text in (page.content(), *responses):
        assert "umbrella" not in text
        assert "japanese" not in text


def test_what_a_tenant_may_not_change_has_no_actions(visits, keys):
    page = open_adapters(visits, keys.of["acme"], "adapters/chinese")
    page.get_by_text("all applied").wait_for()
    for name in ("Replace", "Pin", "Actions"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    expect(page.get_by_text(CHINESE)).to_have_count(0)  # the source is the server's own matter
    page.goto(page.url.replace("chinese", "acme-own"))
    page.get_by_role("button", name="Actions").wait_for()
    page.get_by_role("link", name="Traffic").click()
    page.get_by_role("cell").first.wait_for()
    expect(page.get_by_role("columnheader").first).to_have_text("Requests")


def test_another_tenants_adapter_is_not_there(visits, keys):
    visits.expect_status(404)
    page = open_adapters(visits, keys.of["acme"], "adapters/umbrella-own")
    page.get_by_text("no adapter of this name").wait_for()


def test_a_name_that_a_tenant_may_not_manage_is_refused_in_words(visits, keys):
    visits.expect_status(403)
    page = open_adapters(visits, keys.of["acme"], "adapters?add=1")
    dialog = page.get_by_role("dialog")
    dialog.locator(".load-name").fill("umbrella-more")
    dialog.get_by_role("button", name="Path or address").click()
    dialog.locator(".source-path").fill(CHINESE)
    dialog.locator(".source-path").press("Enter")
    dialog.get_by_role("alert").get_by_text("may not manage adapter 'umbrella-more'").wait_for()


def test_a_reader_has_no_way_to_load(visits, keys):
    page = open_adapters(visits, keys.of["reader"], "adapters?add=1")
    page.get_by_role("row").filter(has_text="chinese").wait_for()
    expect(page.get_by_role("button", name="Load")).to_have_count(0)
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_an_operator_sees_the_use_of_all_tenants(visits, keys):
    page = open_adapters(visits, keys.of["ops"], "adapters/chinese?tab=traffic")
    page.get_by_role("cell", name="acme").wait_for()
    page.goto(page.url.split("#")[0] + "#/adapters")
    page.get_by_text("more of rank 8").wait_for()
