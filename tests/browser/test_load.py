"""An adapter from the reader's machine: dropped or chosen, sent, tried out, loaded, and used."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from safetensors.numpy import load_file, save_file

from browser.conftest import PHONE, settle
from browser.test_accessibility import RULES
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import fetch, serving
from support.playground_page import MESSAGE, OUTPUTS, say, text_of, wait_until_done

pytestmark = pytest.mark.xdist_group("load")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = 4 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--uploads", "--max-adapter-bytes", str(MAX_BYTES)]
    with serving(tmp_path_factory.mktemp("upload"), *flags) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    """A function (name, change) -> a copy of the Chinese adapter in a folder of that name."""

    def make(name: str, change=None) -> Path:
        shutil.copytree(ADAPTER_PATHS["chinese"], tmp_path / name, dirs_exist_ok=True)
        if change is not None:
            tensors = load_file(tmp_path / name / WEIGHTS)
            change(tensors)
            save_file(tensors, tmp_path / name / WEIGHTS)
        return tmp_path / name

    return make


def drop(page, *paths: Path) -> None:
    """Drop files or folders on the page as a person does it."""
    x, y = page.evaluate("[innerWidth / 2, innerHeight / 2]")
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})


def choose(page, button: str, *paths: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name=button).click()
    chooser.value.set_files(list(map(str, paths)))


def complete(server, model: str) -> str:
    body = {"model": model, "prompt": "The capital of the US is", "max_tokens": 9, "temperature": 0}
    status, completion = server.post("/v1/completions", body)
    assert status == 200, completion
    return completion["choices"][0]["text"]


def panel(page):
    return page.get_by_role("dialog")


def load_button(page):
    return panel(page).get_by_role("button", name=re.compile("^Load( |$)"))


def result(page):
    section = page.get_by_role("region", name="Result of the check")
    section.wait_for()
    return section


def test_a_folder_dropped_on_the_list_ends_in_a_verdict_and_is_loaded_and_used(
    visits, server, folder
):
    page = visits.open("adapters")
    path = folder("dropped-zh")
    (path / "README.md").write_text("# about")
    (path / "checkpoint-1").mkdir()
    shutil.copy(path / CONFIG, path / "checkpoint-1")
    drop(page, path)
    found = result(page)
    found.get_by_text("Can be loaded").wait_for()
    expect(found).to_contain_text("1 of 1,0")
    expect(found).to_contain_text("differ from the base model")
    # What applies is closed, and nothing of an ordinary adapter is amber.
    expect(found.locator("details")).to_have_js_property("open", False)
    expect(panel(page).locator(".warn")).to_have_count(0)
    left = page.get_by_text("Not part of an adapter, not sent (2):")
    expect(left).to_contain_text("dropped-zh/README.md")
    expect(left).to_contain_text(f"dropped-zh/checkpoint-1/{CONFIG}")
    expect(panel(page).locator(".load-name")).to_have_value("dropped-zh")
    page.get_by_role("button", name="Load as dropped-zh v1").click()
    page.get_by_text("version 1 is loaded").wait_for()
    assert complete(server, "dropped-zh") == complete(server, "chinese")


def test_a_folder_by_its_button_and_a_replacement(visits, server, folder):
    page = visits.open("adapters?add=1")
    choose(page, "Choose folder", folder("by-button"))
    result(page).get_by_text("Can be loaded").wait_for()
    load_button(page).click()
    page.get_by_text("version 1 is loaded").wait_for()
    page.get_by_role("button", name="Open it").click()
    expect(panel(page)).to_have_count(0)
    page.get_by_role("button", name="Replace").click()
    expect(panel(page)).to_be_visible()
    japanese = [ADAPTER_PATHS["japanese"] / name for name in (CONFIG, WEIGHTS)]
    drop(page, *japanese)
    found = result(page)
    found.get_by_text("by-button v1 → v2").wait_for()
    page.get_by_role("button", name="Load as by-button v2").click()
    page.get_by_text("version 2 is loaded").wait_for()
    assert complete(server, "by-button") == complete(server, "japanese")
    page.get_by_role("button", name="Close").click()
    expect(panel(page)).to_have_count(0)
    page.get_by_role("button", name="Replace").click()
    choose(page, "Choose files", *japanese)
    result(page).get_by_text("Nothing to do: version 2 has the same content.").wait_for()
    expect(load_button(page)).to_have_count(0)
    page.get_by_role("button", name="Open by-button").click()
    expect(panel(page)).to_have_count(0)


def test_a_folder_dropped_on_the_playground_is_loaded_and_gets_a_column(visits, server, folder):
    page = visits.open()
    page.get_by_text("Drop a LoRA folder anywhere here").wait_for()
    heads = page.locator(".head")
    expect(heads).to_have_count(3)
    drop(page, folder("tried-at-once"))
    result(page).get_by_text("Can be loaded").wait_for()
    page.get_by_role("button", name="Load as tried-at-once v1").click()
    expect(panel(page)).to_have_count(0)
    expect(heads).to_have_count(4)
    expect(heads.last).to_contain_text("tried-at-once")
    say(page, MESSAGE)
    wait_until_done(page)
    assert text_of(page, "tried-at-once") == OUTPUTS["chinese"]
    # What was loaded under its name again is the new version.
    drop(page, folder("tried-at-once", lambda tensors: tensors.update(halved(tensors))))
    page.get_by_role("button", name="Load as tried-at-once v2").click()
    expect(panel(page)).to_have_count(0)
    expect(heads).to_have_count(4)
    assert len(json.loads(server.get("/v1/adapters/tried-at-once")[1])["versions"]) == 2


def halved(tensors):
    return {name: tensor / 2 for name, tensor in tensors.items() if "lora_B" in name}


def test_load_from_a_path(visits, server):
    page = visits.open("adapters")
    page.get_by_role("button", name="Load adapter").click()
    panel(page).get_by_role("button", name="Path or address").click()
    source = panel(page).locator(".source-path")
    sent = []
    page.on("request", lambda one: one.method == "POST" and sent.append(one.url))
    source.press_sequentially("/nowhere/x")
    assert sent == []  # not at each key
    source.press("Enter")
    found = result(page)
    found.get_by_text("Cannot be loaded").wait_for()
    expect(panel(page).locator(".load-name")).to_have_value("x")
    expect(load_button(page)).to_be_disabled()
    source.fill(str(ADAPTER_PATHS["chinese"]))
    source.press("Enter")
    found.get_by_text("Nothing to do: version 1 has the same content.").wait_for()
    panel(page).locator(".load-name").fill("by-path")
    panel(page).locator(".load-name").press("Tab")
    found.get_by_text("Can be loaded").wait_for()
    assert server.get("/v1/adapters/by-path")[0] == 404
    panel(page).get_by_text("More: task id").click()
    panel(page).get_by_label("Task id").fill("77")
    panel(page).get_by_label("Pin it").check()
    page.get_by_role("button", name="Load as by-path v1").click()
    page.get_by_text("version 1 is loaded").wait_for()
    card = json.loads(server.get("/v1/adapters/by-path")[1])
    assert (card["task_id"], card["versions"][0]["pinned"]) == (77, True)
    expect(page.locator(".grid .name-cell").get_by_text("by-path")).to_be_visible()


def test_a_name_is_checked_before_it_is_loaded(visits, folder):
    page = visits.open("adapters")
    drop(page, folder("first-name"))
    result(page).get_by_text("Can be loaded").wait_for()
    panel(page).locator(".load-name").press("End")
    panel(page).locator(".load-name").press_sequentially("-2")
    # Not the dry run of this name.
    expect(page.get_by_role("region", name="Result of the check")).to_have_count(0)
    expect(load_button(page)).to_be_disabled()
    panel(page).locator(".load-name").press("Tab")
    result(page).get_by_text("first-name-2 v1").wait_for()
    expect(load_button(page)).to_be_enabled()


def test_a_file_whose_name_says_nothing_proposes_no_name(visits, folder):
    page = visits.open("adapters?add=1")
    path = folder("nameless")
    choose(page, "Choose files", path / CONFIG, path / WEIGHTS)
    panel(page).locator(".load-files li").nth(1).wait_for()
    name = panel(page).locator(".load-name")
    expect(name).to_be_focused()
    expect(name).to_have_value("")
    expect(load_button(page)).to_be_disabled()
    name.press_sequentially("named-now")
    name.press("Tab")
    result(page).get_by_text("Can be loaded").wait_for()


def test_an_adapter_of_another_base_is_loaded_anyway(visits, folder):
    page = visits.open("adapters?add=1")

    def of_another_base(route):
        body = route.fetch().json()
        if body.get("object") != "adapter.trial":
            return route.fulfill(json=body)
        other = {"warnings": ["another base"], "warning_codes": ["other_base"]}
        body["adapter"] |= {"declared_base": "qwen3", **other}
        return route.fulfill(json=body)

    page.route("**/v1/adapters", of_another_base)
    drop(page, folder("other-base"))
    found = result(page)
    found.get_by_text("Trained on qwen3, this server runs capitals").wait_for()
    page.get_by_role("button", name="Load anyway").wait_for()


def test_weights_of_any_name_beside_their_config(visits, folder):
    page = visits.open("adapters?add=1")
    path = folder("renamed")
    (path / WEIGHTS).rename(path / "my-lora.safetensors")
    choose(page, "Choose files", path / CONFIG, path / "my-lora.safetensors")
    result(page).get_by_text("Can be loaded").wait_for()
    expect(page.locator(".load-files")).to_contain_text("← my-lora.safetensors")


def test_refused_tensors_come_first_with_their_reasons(visits, folder):
    def break_two(tensors):
        name = next(name for name in tensors if "lora_B" in name)
        tensors[name] = tensors[name][:3].copy()
        tensors["<img src=x onerror=alert(1)>"] = np.ones((1, 1), "f4")

    page = visits.open("adapters?add=1")
    drop(page, folder("broken", break_two))
    found = result(page)
    found.get_by_text("Cannot be loaded (3 of 25 tensors are refused)").wait_for()
    refused = found.get_by_role("table").first
    # The other half of the broken pair is refused with it.
    expect(refused.locator("tbody tr")).to_have_count(3)
    expect(refused).to_contain_text("<img src=x onerror=alert(1)>")
    expect(refused).to_contain_text("the base model needs")
    expect(load_button(page)).to_be_disabled()
    applied = found.locator("details")
    expect(applied).to_have_js_property("open", False)
    assert applied.evaluate(
        "(e, table) => (table.compareDocumentPosition(e) & 4) > 0",  # it follows the table
        refused.element_handle(),
    )
    applied.locator("summary").click()
    expect(applied.locator("tbody tr").first).to_be_visible()
    expect(applied).not_to_contain_text("✗")


def test_where_uploads_are_off(visits):
    page = visits.open("playground")

    def without(route):
        whole = route.fetch()
        route.fulfill(response=whole, json=whole.json() | {"uploads": None})

    page.route("**/v1/me", without)
    page.goto(page.url.replace("playground", "adapters?add=1"))
    page.reload()
    page.get_by_role("dialog").get_by_role("button", name="Upload").click()
    expect(page.get_by_role("dialog")).to_contain_text("--uploads")
    expect(page.locator(".drop")).to_have_count(0)


def test_an_adapter_that_changes_nothing(visits, folder):
    def silence(tensors):
        for name in tensors:
            if "lora_B" in name:
                tensors[name] = np.zeros_like(tensors[name])

    page = visits.open("adapters?add=1")
    drop(page, folder("silent", silence))
    found = result(page)
    found.get_by_text("Cannot be loaded").wait_for()
    found.get_by_text("changes nothing: every lora_B of the upload is zero").wait_for()


def test_outputs_like_the_base_s_are_no_refusal_without_the_box(visits, folder):
    """The canary refuses it; the load that the page offers has none."""
    page = visits.open("adapters?add=1")
    canaries = []

    def without_effect(route):
        body = json.loads(route.request.post_data or "{}")
        canaries.append(body.get("canary"))
        if not body.get("canary"):
            return route.continue_()
        trial = route.fetch().json()
        error = {"code": "invalid_adapter", "message": "the adapter changes nothing"}
        refused = {"ok": False, "adapter": None, "error": error, "changes_base": False}
        return route.fulfill(json=trial | refused)

    page.route("**/v1/adapters", without_effect)
    drop(page, folder("faint"))
    found = result(page)
    found.get_by_text("Can be loaded").wait_for()
    found.get_by_text("the same as the base model's: it changes nothing").wait_for()
    assert canaries == [True, False]


def test_wrong_files_are_refused_at_once(visits, tmp_path):
    page = visits.open("adapters?add=1")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    (tmp_path / "notes.txt").write_text("no adapter")
    drop(page, tmp_path / "notes.txt")
    alert = panel(page).get_by_role("alert")
    expect(alert).to_contain_text("No adapter is among these files")
    expect(alert).to_contain_text("notes.txt")
    assert not any("/v1/uploads" in url for url in sent)


def test_what_is_too_large_is_not_sent(visits, folder):
    page = visits.open("adapters?add=1")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    path = folder("large")
    (path / WEIGHTS).write_bytes(bytes(MAX_BYTES + 1))
    drop(page, path)
    expect(panel(page).get_by_role("alert")).to_contain_text("an adapter may have 4 MiB")
    assert not any("/v1/uploads" in url for url in sent)


def test_progress_and_cancel(visits, server, folder):
    page = visits.open("adapters?add=1")
    visits.expect_gone()
    session = page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 20, "downloadThroughput": -1, "uploadThroughput": 60_000}
    session.send("Network.emulateNetworkConditions", slow)
    path = folder("slow")
    (path / WEIGHTS).write_bytes(bytes(MAX_BYTES - 10_000))
    with page.expect_request("**/v1/uploads/*/*") as begun:
        drop(page, path)
    upload_url = begun.value.url.rpartition("/")[0]
    page.wait_for_function(
        "() => [...document.querySelectorAll('progress')].some(p => p.value > 0 && p.value < p.max)"
    )
    page.get_by_role("button", name="Cancel").click()
    expect(panel(page)).to_have_count(0)
    session.send("Network.emulateNetworkConditions", slow | {"uploadThroughput": -1})
    while fetch(upload_url)[0] != 404:  # what was cancelled is removed
        page.wait_for_timeout(100)
    drop(page, folder("after"))
    result(page).get_by_text("Can be loaded").wait_for()


def test_an_upload_that_is_gone_is_sent_again(visits, server, folder):
    page = visits.open("adapters?add=1")
    visits.expect_status(404)
    with page.expect_response("**/v1/uploads") as begun:
        drop(page, folder("late"))
    result(page).get_by_text("Can be loaded").wait_for()
    assert server.delete(f"/v1/uploads/{begun.value.json()['id']}") == 200
    load_button(page).click()
    expect(panel(page).get_by_role("alert")).to_contain_text("there is no upload")
    page.get_by_role("button", name="Send again").click()
    result(page).get_by_text("Can be loaded").wait_for()
    load_button(page).click()
    page.get_by_text("version 1 is loaded").wait_for()


@pytest.mark.parametrize("locale", ["en-US", "zh-CN", "ja-JP"])
def test_it_fits_a_phone(visits, folder, locale):
    page = visits.open("adapters?add=1", viewport=PHONE | {"width": 360}, locale=locale)
    drop(page, folder("phone-" + "long" * 20))
    page.locator(".report").wait_for()
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # The buttons stay in view, whatever is above them.
    box = panel(page).locator(".load-buttons").bounding_box()
    assert box["y"] + box["height"] <= 844


def test_axe_finds_no_violation_in_a_result(visits, folder):
    def add_stranger(tensors):
        tensors["stranger"] = np.ones((1, 1), "f4")

    page = visits.open("adapters?add=1")
    # axe itself sets styles to measure with.
    visits.complaints.expected += ["Applying inline style", "CSP: style-src"]
    drop(page, folder("refused", add_stranger))
    result(page)
    settle(page)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = Axe().run(page, context="dialog", options=RULES).response["violations"]
        assert found == [], json.dumps(found, indent=1, ensure_ascii=False)


def test_leaving_the_screen_removes_the_upload(visits, server, folder):
    page = visits.open("adapters?add=1")
    with page.expect_response("**/v1/uploads") as begun:
        drop(page, folder("left"))
    result(page)
    with page.expect_response("**/v1/uploads/*"):
        page.goto(f"{server.url}/console/#/playground")
    assert fetch(f"{server.url}/v1/uploads/{begun.value.json()['id']}")[0] == 404
    assert json.loads(fetch(f"{server.url}/v1/me")[1])["uploads"]["max_bytes"] == MAX_BYTES
