"""Adapters that were loaded over the API survive a killed server with the same outputs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from loraplex.adapters.formats.export import StorageType
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import RunningServer, serving
from support.capitals.corpus import COUNTRIES, capital_of, founding_prompts
from support.triton_requests import TRUE, i32, tensors, text_request

pytestmark = pytest.mark.xdist_group("store")

USA = COUNTRIES[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[np.ndarray, np.ndarray]:
    """The Japanese adapter as lora_weights and lora_config."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(read_peft(str(ADAPTER_PATHS["japanese"])).rows, folder, StorageType.FLOAT16)
    return (
        np.load(folder / "model.lora_weights.npy"),
        np.load(folder / "model.lora_config.npy"),
    )


def complete(server: RunningServer, model: str) -> str:
    body = {
        "model": model,
        "prompt": founding_prompts(USA)["english"],
        "max_tokens": 24,
        "temperature": 0,
    }
    status, reported = server.post("/v1/completions", body)
    assert status == 200, reported
    return reported["choices"][0]["text"].strip()


def complete_task(server: RunningServer, task_id: int, pair=None) -> str:
    inputs = text_request(
        triton_grpc,
        founding_prompts(USA)["english"],
        24,
        top_k=i32(1),
        exclude_input_in_output=TRUE,
    )
    inputs += tensors(triton_grpc, lora_task_id=np.array([[task_id]], dtype=np.uint64))
    if pair is not None:
        inputs += tensors(triton_grpc, lora_weights=pair[0], lora_config=pair[1])
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        result = client.infer("ensemble", inputs)
    return result.as_numpy("text_output").flatten()[0].decode().strip()


def listed(server: RunningServer) -> dict[str, dict]:
    return {entry["name"]: entry for entry in json.loads(server.get("/v1/adapters")[1])["data"]}


def show(server: RunningServer, name: str) -> dict:
    status, body = server.get(f"/v1/adapters/{quote(name)}")
    assert status == 200, body
    return json.loads(body)


def kill(server: RunningServer) -> None:
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


def loraplex(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "loraplex", "adapters", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_all_that_was_accepted_is_there_after_a_kill(tmp_path, pair):
    state_dir, mine = tmp_path / "state", tmp_path / "mine"
    shutil.copytree(ADAPTER_PATHS["chinese"], mine)
    with serving(state_dir) as server:
        assert server.post("/v1/adapters", {"name": "a/b.c", "path": str(mine)})[0] == 201
        other = {"name": "a/b.c", "path": str(ADAPTER_PATHS["japanese"]), "replace": True}
        status, replaced = server.post("/v1/adapters", other)
        assert (status, replaced["version"]) == (201, 2)
        assert server.post("/v1/adapters/a/b.c/alias", {"alias": "live"})[0] == 200
        assert server.post("/v1/adapters/a/b.c/pin", {"version": 1})[0] == 200
        assert complete_task(server, 77, pair) == capital_of(USA, "japanese")
        before = {name: entry | {"residency": ""} for name, entry in listed(server).items()}
        kill(server)
    shutil.rmtree(mine)
    with serving(state_dir) as server:
        after = {name: entry | {"residency": ""} for name, entry in listed(server).items()}
        assert after == before
        assert complete(server, "live") == capital_of(USA, "japanese")
        assert complete_task(server, 77) == capital_of(USA, "japanese")
        shown = show(server, "live")
        assert shown["aliases"] == ["live"]
        assert [(v["version"], v["pinned"]) for v in shown["versions"]] == [(2, False), (1, True)]
        status, back = server.post("/v1/adapters/a/b.c/rollback", {})
        assert (status, back["version"], back["source"]) == (200, 3, str(mine))
        assert complete(server, "live") == capital_of(USA, "chinese")
        assert server.stop() == 0


@pytest.mark.slow
def test_lost_files(tmp_path, pair):
    """A configured adapter's file is made again; what came in a request cannot be."""
    state_dir = tmp_path / "state"
    with serving(state_dir) as server:
        complete_task(server, 77, pair)
        inline_digest = listed(server)["77"]["digest"]
    shutil.rmtree(state_dir / "adapters")
    with serving(state_dir) as server:
        assert complete(server, "chinese") == capital_of(USA, "chinese")
        entry = listed(server)["77"]
        assert (entry["digest"], entry["state"]) == (inline_digest, "missing")
        body = {"model": "77", "prompt": "x", "max_tokens": 1}
        status, reported = server.post("/v1/completions", body)
        assert (status, reported["error"]["code"]) == (503, "adapter_load_failed")
        assert "load it again from a request's lora_weights" in reported["error"]["message"]


@pytest.mark.slow
def test_without_persistence(tmp_path):
    """It sees nothing of the store, may share the state directory, and leaves it as it is."""
    state_dir = tmp_path / "state"
    with serving(state_dir) as owner, serving(state_dir, "--no-persist-adapters") as guest:
        assert set(listed(guest)) == set(ADAPTER_PATHS)
        loaded = guest.post("/v1/adapters", {"name": "new", "path": str(ADAPTER_PATHS["chinese"])})
        assert loaded[0] == 201
        assert complete(guest, "new") == capital_of(USA, "chinese")
        assert "new" not in listed(owner)
        second = subprocess.run(
            [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH)]
            + ["--state-dir", str(state_dir)]
            + [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert f"in use by another server, process {owner.process.pid}" in second.stderr


@pytest.mark.slow
def test_the_command_line(server):
    name, url = "cli/x", ("--url", server.url)
    path = str(ADAPTER_PATHS["chinese"])
    dry = loraplex("load", name, path, "--dry-run", "--canary", *url)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("nothing was loaded: a dry run")
    assert "canary   log probabilities differ by up to" in dry.stdout
    loaded = json.loads(loraplex("load", name, path, "--json", *url).stdout)
    try:
        assert (loaded["version"], loaded["unchanged"]) == (1, False)
        assert loaded["content"]["device_bytes"] > 0
        table = loraplex("list", *url).stdout.splitlines()
        assert any(line.split()[:4] == [name, "capitals", "-", "1"] for line in table[1:])
    finally:
        assert loraplex("unload", name, "--immediate", *url).returncode == 0
