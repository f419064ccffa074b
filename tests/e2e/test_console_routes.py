"""What the console does with the API, with curl's means: a real server, the shipped model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import MODEL, serving
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("console_routes")]

ADAPTERS = [None, "chinese", "japanese"]
FRANCE, JAPAN = ("Q: What is the capital of France?\nA:", "Q: What is the capital of Japan?\nA:")


@pytest.fixture(scope="module")
def http(tmp_path_factory) -> Iterator[httpx.Client]:
    with (
        serving(tmp_path_factory.mktemp("console") / "state") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        # Each adapter is on the device from now on.
        compare(client, prompt=FRANCE, adapters=ADAPTERS)
        yield client


def compare(client: httpx.Client, **body) -> list[dict]:
    response = client.post("/v1/compare", json={"max_tokens": 9} | body)
    assert response.status_code == 200, response.text
    return response.json()["answers"]


def test_outputs_of_one_request_are_one_batch(http):
    """Also if each has a history of its own."""
    shared = compare(http, prompt=JAPAN, adapters=ADAPTERS)
    own = compare(
        http,
        entries=[
            {"adapters": adapter, "prompt": prompt}
            for adapter, prompt in zip(ADAPTERS, (FRANCE, JAPAN, FRANCE), strict=True)
        ],
    )
    for outputs in (shared, own):
        assert len({output["timing"]["first_step"] for output in outputs}) == 1
    assert own[1]["text"] == shared[1]["text"], "its prompt is the same in both"
    assert own[2]["versus_base"]["num_same_tokens"] == 0


def test_one_output_is_generated_again_alone(http):
    whole = compare(http, prompt=FRANCE, adapters=ADAPTERS)
    for adapter, before in zip(ADAPTERS, whole, strict=True):
        [alone] = compare(http, entries=[{"adapters": adapter, "prompt": FRANCE}])
        assert alone["text"] == before["text"]
        [other] = compare(
            http, entries=[{"adapters": adapter, "prompt": FRANCE, "seed": 1}], temperature=5
        )
        assert other["text"] != before["text"]


def test_a_second_turn_goes_on_from_each_output(http):
    first = compare(http, prompt=FRANCE, adapters=ADAPTERS)
    turns = [f"{FRANCE}{output['text']}\n{JAPAN}" for output in first]
    entries = [
        {"adapters": adapter, "prompt": turn} for adapter, turn in zip(ADAPTERS, turns, strict=True)
    ]
    second = compare(http, entries=entries)
    assert second[0]["text"] != second[1]["text"] != second[2]["text"]
    for turn, entry, output in zip(turns, entries, second, strict=True):
        [alone] = compare(http, entries=[entry])
        assert alone["text"] == output["text"], "it is the same turn in a batch and alone"
        tokens = http.post("/tokenize", json={"prompt": turn}).json()
        assert output["prompt_tokens"] == tokens["count"]


def copy_of(name: str, folder: Path, **config) -> Path:
    """A copy of a shipped adapter whose configuration has other values."""
    shutil.copytree(ADAPTER_PATHS[name], folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_rounding_is_a_note_and_another_base_a_warning(http, tmp_path):
    shipped = http.get("/v1/adapters/chinese").json()
    assert (shipped["content"]["dtypes"], shipped["content"]["device_dtype"]) == (
        ["F16"],
        "bfloat16",
    )
    assert shipped["warnings"] == []
    assert len(shipped["notes"]) == 1
    copied = copy_of("chinese", tmp_path / "other", base_model_name_or_path="org/qwen3")
    body = {"name": "other", "path": str(copied), "dry_run": True, "details": True}
    trial = http.post("/v1/adapters", json=body).json()
    assert trial["declared_base"] == "org/qwen3"
    said = trial["error"]["message"] if trial["error"] else trial["adapter"]["warnings"][0]
    served = http.get("/v1/models").json()["data"][0]
    assert "org/qwen3" in said
    assert (MODEL in said) or (served["root"] in said) or ("base" in said)


def test_two_versions_are_compared(http):
    for name in ("chinese", "japanese"):
        body = {"name": "mine", "path": str(ADAPTER_PATHS[name]), "replace": True}
        assert http.post("/v1/adapters", json=body).status_code == 201
    now, old = (
        http.get("/v1/adapters/mine", params=query).json() for query in ({}, {"version": 1})
    )
    assert {name for name in now if now[name] != old[name]} <= {
        *("version", "digest", "created", "source", "residency"),
    }
    chosen = [{"digest": old["digest"]}, {"digest": now["digest"]}]
    outputs = compare(http, prompt=FRANCE, adapters=chosen)
    expected = compare(http, prompt=FRANCE, adapters=["chinese", "japanese"])
    assert [output["text"] for output in outputs] == [output["text"] for output in expected]


def test_the_minutes_before_a_page_is_opened(http):
    compare(http, prompt=FRANCE, adapters=ADAPTERS)

    def history() -> dict:
        return http.get("/v1/history", params={"seconds": 900}).json()

    assert eventually(lambda: any(point["output_tokens"] for point in history()["points"]))
    memory = http.get("/v1/memory").json()[MODEL]
    found = history()
    assert found["capacity"] == {
        "kv_blocks": memory["kv"]["blocks"],
        "adapter_pages": memory["device"]["pages"],
        "max_num_seqs": memory["max_num_seqs"],
    }
    used = [point for point in found["points"] if point["output_tokens"]]
    assert max(point["running"] for point in used) >= 1
    assert all(point["running"] <= memory["max_num_seqs"] for point in found["points"])
    assert sum(sum(point["e2e"]) for point in used) >= 3
    assert max(point["pages_used"] for point in found["points"]) > 0
    assert found["last_request"] is not None


def test_a_failed_request_shows_why(http):
    http.post("/v1/completions", json={"model": "zz", "prompt": FRANCE})
    http.post("/v1/adapters", json={"name": "bad", "path": "/no/such/folder"})
    failed = http.get("/v1/requests", params={"status": "error"}).json()["requests"]
    by_subject = {request["subject"]: request for request in failed}
    assert "'zz'" in by_subject[None]["message"]
    assert by_subject["bad"]["kind"] == "adapter"
    assert by_subject["bad"]["message"]


def test_the_device_is_named(http):
    entry = http.get("/v1/models").json()["data"][0]
    assert (entry["device"], entry["dtype"]) == ("cpu", "bfloat16")
    assert entry["device_name"]
