"""An adapter from the reader's machine: dropped or chosen, sent, tried out, loaded, and used."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from safetensors.numpy import load_file, save_file

from browser.conftest import PHONE
from browser.test_accessibility import RULES
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import fetch, serving

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
        shutil.copytree(ADAPTER_PATHS["chinese"], tmp_path / name)
        if change is not None:
            tensors = load_file(tmp_path / name / WEIGHTS)
            change(tensors)
            save_file(tensors, tmp_path / name / WEIGHTS)
        return tmp_path / name

    return make


def drop(page, *paths: Path) -> None:
    """Drop files or folders as a person does it."""
    target = page.locator(".drop")
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
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
    return page.locator(".upload")


def load_button(page):
    return panel(page).get_by_role("button", name="Load", exact=True)


def result(page):
    section = page.get_by_role("region", name="Result of the dry run")
    section.wait_for()
    return section


def test_a_folder_is_dropped_tried_out_loaded_and_used(visits, server, folder):
    page = visits.open("adapters?add=1")
    path = folder("dropped-zh")
    (path / "README.md").write_text("# about")
    (path / "checkpoint-1").mkdir()
    shutil.copy(path / CONFIG, path / "checkpoint-1")
    drop(page, path)
    found = result(page)
    found.get_by_text("It can be loaded.").wait_for()
    assert "PEFT: " in found.inner_text()
    assert "Pages of the device: 1 needed" in found.inner_text()
    assert "Outputs differ from the base model" in found.inner_text()
    left = page.get_by_text("Not part of an adapter, not sent (2):").inner_text()
    assert "dropped-zh/README.md" in left
    assert f"dropped-zh/checkpoint-1/{CONFIG}" in left
    assert panel(page).get_by_label("Name").input_value() == "dropped-zh"
    load_button(page).click()
    page.get_by_text("version 1 is loaded").wait_for()
    assert complete(server, "dropped-zh") == complete(server, "chinese")


def test_a_folder_by_its_button_and_a_replacement(visits, server, folder):
    page = visits.open("adapters?add=1")
    choose(page, "Choose a folder", folder("by-button"))
    result(page).get_by_text("It can be loaded.").wait_for()
    load_button(page).click()
    page.get_by_text("version 1 is loaded").wait_for()
    drop(page, *(ADAPTER_PATHS["japanese"] / name for name in (CONFIG, WEIGHTS)))
    result(page).get_by_text("It can be loaded.").wait_for()
    page.get_by_role("button", name="Replace, version 2").click()
    page.get_by_text("version 2 is loaded").wait_for()
    assert complete(server, "by-button") == complete(server, "japanese")
    choose(page, "Choose files", *(ADAPTER_PATHS["japanese"] / n for n in (CONFIG, WEIGHTS)))
    result(page).get_by_text("Version 2 has the same content already.").wait_for()


def test_weights_of_any_name_beside_their_config(visits, folder):
    page = visits.open("adapters?add=1")
    path = folder("renamed")
    (path / WEIGHTS).rename(path / "my-lora.safetensors")
    choose(page, "Choose files", path / CONFIG, path / "my-lora.safetensors")
    result(page).get_by_text("It can be loaded.").wait_for()
    assert "← my-lora.safetensors" in page.locator(".upload-files").inner_text()


def test_a_refused_tensor_is_shown_with_its_reason(visits, folder):
    def break_two(tensors):
        name = next(name for name in tensors if "lora_B" in name)
        tensors[name] = tensors[name][:3].copy()
        tensors["<img src=x onerror=alert(1)>"] = np.ones((1, 1), "f4")

    page = visits.open("adapters?add=1")
    drop(page, folder("broken", break_two))
    found = result(page)
    found.get_by_text("It cannot be loaded.").wait_for()
    rows = found.get_by_role("table").locator("tbody tr:not(.reason)")
    expect(rows).to_have_count(3)
    text = found.get_by_role("table").inner_text()
    assert "<img src=x onerror=alert(1)>" in text
    assert "the base model needs" in text
    assert load_button(page).is_disabled()
    page.get_by_label("Show").select_option("applied")
    assert rows.count() > 3
    assert "✗" not in found.get_by_role("table").inner_text()


def test_where_uploads_are_off(visits):
    page = visits.open("playground")

    def without(route):
        whole = route.fetch()
        route.fulfill(response=whole, json=whole.json() | {"uploads": None})

    page.route("**/v1/me", without)
    page.goto(page.url.replace("playground", "adapters?add=1"))
    page.reload()
    page.get_by_text("This server takes no uploads.").wait_for()
    assert "--uploads" in page.locator(".upload").inner_text()
    expect(page.locator(".drop")).to_have_count(0)


def test_an_adapter_that_changes_nothing(visits, folder):
    def silence(tensors):
        for name in tensors:
            if "lora_B" in name:
                tensors[name] = np.zeros_like(tensors[name])

    page = visits.open("adapters?add=1")
    drop(page, folder("silent", silence))
    result(page).get_by_text("It changes nothing").wait_for()


def test_wrong_files_are_refused_at_once(visits, tmp_path):
    page = visits.open("adapters?add=1")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    (tmp_path / "notes.txt").write_text("no adapter")
    drop(page, tmp_path / "notes.txt")
    alert = panel(page).get_by_role("alert")
    alert.wait_for()
    assert "No adapter is among these files" in alert.inner_text()
    assert "notes.txt" in alert.inner_text()
    assert not any("/v1/uploads" in url for url in sent)


def test_what_is_too_large_is_not_sent(visits, folder):
    page = visits.open("adapters?add=1")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    path = folder("large")
    (path / WEIGHTS).write_bytes(bytes(MAX_BYTES + 1))
    drop(page, path)
    alert = panel(page).get_by_role("alert")
    alert.wait_for()
    assert "an adapter may have 4 MB" in alert.inner_text()
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
    page.get_by_role("button", name="Cancel").wait_for(state="detached")
    session.send("Network.emulateNetworkConditions", slow | {"uploadThroughput": -1})
    expect(page.locator(".upload-files")).to_have_count(0)
    while fetch(upload_url)[0] != 404:  # what was cancelled is removed
        page.wait_for_timeout(100)
    drop(page, folder("after"))
    result(page).get_by_text("It can be loaded.").wait_for()


def test_an_upload_that_is_gone_is_sent_again(visits, server, folder):
    page = visits.open("adapters?add=1")
    visits.expect_status(404)
    with page.expect_response("**/v1/uploads") as begun:
        drop(page, folder("late"))
    result(page).get_by_text("It can be loaded.").wait_for()
    assert server.delete(f"/v1/uploads/{begun.value.json()['id']}") == 200
    load_button(page).click()
    assert "there is no upload" in panel(page).get_by_role("alert").inner_text()
    page.get_by_role("button", name="Send again").click()
    result(page).get_by_text("It can be loaded.").wait_for()
    load_button(page).click()
    page.get_by_text("version 1 is loaded").wait_for()


@pytest.mark.parametrize("locale", ["en-US", "zh-CN", "ja-JP"])
def test_it_fits_a_phone(visits, folder, locale):
    page = visits.open("adapters?add=1", viewport=PHONE | {"width": 360}, locale=locale)
    drop(page, folder("phone-" + "long" * 20))
    page.locator(".trial").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_axe_finds_no_violation_in_a_result(visits, folder):
    def add_stranger(tensors):
        tensors["stranger"] = np.ones((1, 1), "f4")

    page = visits.open("adapters?add=1")
    # axe itself sets styles to measure with.
    visits.complaints.expected += ["Applying inline style", "CSP: style-src"]
    drop(page, folder("refused", add_stranger))
    result(page)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = Axe().run(page, context=".upload", options=RULES).response["violations"]
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
