"""Two servers with one folder of declarations: what one loads, the other serves."""

import json

import pytest

from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import RunningServer, serving
from support.capitals.corpus import COUNTRIES, founding_prompts
from support.eventually import eventually

pytestmark = pytest.mark.slow

NEVER, SOON = "--adapter-watch-seconds=3600", "--adapter-watch-seconds=0.2"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two servers: the first reads the declarations only when it has to."""
    folder = tmp_path_factory.mktemp("declarations")
    flag = f"--adapter-declarations={folder}"
    states = [tmp_path_factory.mktemp("state") for _ in range(2)]
    with serving(states[0], flag, NEVER) as one, serving(states[1], flag, SOON) as other:
        yield one, other


def load(server: RunningServer, name: str, adapter: str, **options):
    body = {"name": name, "path": str(ADAPTER_PATHS[adapter])} | options
    return server.post("/v1/adapters", body)


def complete(server: RunningServer, model: str) -> str:
    body = {
        "model": model,
        "prompt": founding_prompts(COUNTRIES[0])["english"],
        "max_tokens": 24,
        "temperature": 0,
    }
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return response["choices"][0]["text"]


def listed(server: RunningServer) -> dict[str, int]:
    cards = json.loads(server.get("/v1/adapters")[1])["data"]
    return {card["name"]: card["version"] for card in cards}


def test_a_load_through_one_serves_requests_to_the_other(replicas):
    one, other = replicas
    status, report = load(other, "shared", "japanese")
    assert (status, report["version"]) == (201, 1)
    assert "shared" not in listed(one)
    assert complete(one, "shared") == complete(one, "japanese") == complete(other, "shared")
    assert json.loads(one.get("/v1/adapters/shared")[1])["digest"] == report["digest"]


def test_one_name_cannot_be_loaded_twice(replicas):
    one, other = replicas
    load(other, "taken", "japanese")
    status, response = load(one, "taken", "chinese")
    assert status == 409
    assert "'taken' already exists (version 1" in response["error"]["message"]


def test_replacements_and_unloads_reach_the_other(replicas):
    one, other = replicas
    names = sorted(ADAPTER_PATHS)
    load(one, "moving", names[0])
    assert complete(other, "moving") == complete(other, names[0])
    status, report = load(one, "moving", names[1], replace=True)
    assert (status, report["version"]) == (201, 2)
    assert eventually(lambda: listed(other).get("moving") == 2)
    assert complete(other, "moving") == complete(other, names[1])
    assert one.delete("/v1/adapters/moving") == 200
    assert eventually(lambda: "moving" not in listed(other))
    status, _ = other.post("/v1/completions", {"model": "moving", "prompt": "x"})
    assert status == 404
