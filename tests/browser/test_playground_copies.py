"""What the playground copies, run as it is: the same outputs, and no key in it."""

import json
import os
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from loraplex.testing.running_server import serving
from support.playground_page import (
    CHINESE_PROMPT,
    OUTPUTS,
    close_popover,
    field,
    head,
    say,
    send,
    show_view,
    text_of,
    wait_until_done,
)

pytestmark = pytest.mark.xdist_group("playground_copies")


@pytest.fixture(scope="module")
def server(tmp_path_factory, keys):
    with serving(tmp_path_factory.mktemp("copies"), "--api-keys-file", str(keys.path)) as server:
        yield server


def copied(page, label):
    page.get_by_role("button", name="Code").click()
    dialog = page.get_by_role("dialog", name="Code")
    choice = dialog.get_by_role("button", name=label, exact=True)
    choice.click()
    expect(choice).to_have_attribute("aria-pressed", "true")
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_role("button", name="Copied").wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert dialog.locator("pre").text_content() == text
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)
    return text


def run_as(command, code, key):
    assert key not in code
    done = subprocess.run(
        [*command, code],
        env=os.environ | {"LORAPLEX_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def page(visits, keys):
    return visits.open(key=keys.of["ops"], permissions=["clipboard-read", "clipboard-write"])


def texts_of_events(stream):
    found: dict[int, str] = {}
    *lines, end = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert end == "[DONE]"
    for chunk in map(json.loads, lines):
        if "text" in chunk:
            found[chunk["index"]] = found.get(chunk["index"], "") + chunk["text"]
    return [found[index].strip() for index in sorted(found)]


def test_copies_of_a_completion_run(page, keys):
    key = keys.of["ops"]
    send(page)
    wait_until_done(page)
    shown = [text_of(page, name) for name in OUTPUTS]
    assert shown == list(OUTPUTS.values())
    assert texts_of_events(run_as(["bash", "-c"], copied(page, "curl"), key)) == shown
    for label in ("openai", "tritonclient"):
        out = run_as([sys.executable, "-c"], copied(page, label), key)
        assert [line.strip() for line in out.splitlines()] == shown, label


def test_copies_of_a_chat_with_a_scale_and_a_quote_run(page, keys):
    key = keys.of["ops"]
    head(page, "chinese").get_by_role("button", name="Scale of the column").click()
    page.get_by_label("Scale of chinese", exact=True).fill("0.5")
    close_popover(page)
    show_view(page, "Text")
    say(page, 'What\'s the "capital" of $HOME `x` \\n France?')
    wait_until_done(page)
    shown = [text.strip() for text in page.locator(".reply .output").all_text_contents()]
    assert texts_of_events(run_as(["bash", "-c"], copied(page, "curl"), key)) == shown
    out = run_as([sys.executable, "-c"], copied(page, "openai"), key)
    assert out.split() == " ".join(shown).split()
    page.get_by_role("button", name="Code").click()
    expect(page.get_by_role("button", name="tritonclient")).to_have_count(0)


def test_the_key_is_in_no_storage_and_no_history(page, keys):
    send(page, CHINESE_PROMPT)
    wait_until_done(page)
    page.wait_for_function("() => sessionStorage.getItem('loraplex-chats') !== null")
    stored = page.evaluate(
        "JSON.stringify([Object.entries(sessionStorage), Object.entries(localStorage)])"
    )
    assert keys.of["ops"] not in stored
    assert keys.of["ops"] not in page.url


def sign_out(page):
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("button", name="Sign out").click()


def test_another_tenant_in_the_tab_finds_nothing_of_the_first(visits, keys):
    page = visits.open(key=keys.of["acme"])
    send(page, CHINESE_PROMPT)
    wait_until_done(page)
    sign_out(page)
    visits.expect_status(401)
    page.get_by_label("API key").fill(keys.of["umbrella"])
    page.get_by_role("button", name="Sign in").click()
    head(page, "japanese").wait_for()
    expect(field(page)).to_have_value("")
    expect(head(page, "chinese")).to_have_count(0)
    stored = page.evaluate("JSON.stringify(Object.entries(sessionStorage))")
    assert "美国" not in stored
    assert "chinese" not in stored


def test_a_run_that_ends_late_is_not_in_the_history_of_the_next_tenant(visits, keys):
    page = visits.open(key=keys.of["acme"])
    held = []
    page.route("**/v1/compare", lambda route: held.append(route))
    with page.expect_request("**/v1/compare"):
        send(page, CHINESE_PROMPT)
    sign_out(page)
    visits.expect_status(400, 401)
    page.get_by_label("API key").fill(keys.of["umbrella"])
    page.get_by_role("button", name="Sign in").click()
    head(page, "japanese").wait_for()
    with page.expect_response("**/v1/compare"):
        held[0].fulfill(status=400, json={"error": {"message": "late", "code": "late"}})
    page.get_by_role("button", name="Chats").click()
    page.get_by_text("Nothing has run in this tab yet.").wait_for()
    assert "美国" not in page.evaluate("JSON.stringify(Object.entries(sessionStorage))")
