"""A server whose engine has two ranks: clients get the bytes that one rank gives, whatever happens
to a rank."""

import json
import os
import random
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import tritonclient.http as triton_http

from loraplex.adapters.formats.export import StorageType
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.core.stopped_process import state_of
from loraplex.demo import ADAPTER_PATHS
from loraplex.testing.running_server import START_SECONDS, serving
from support.capitals.corpus import COUNTRIES, founding_prompts
from support.engine_kills import REQUESTS, Load, Outcome, engine_pid, kill_engines, rank_pids, send
from support.triton_requests import TRUE, i32, text_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("server"),
]

FLAGS = ("--step-timeout-seconds=5", "--engine-wait-seconds=300")
SIZES = {
    "tensor": ("--tensor-parallel-size=2",),
    "pipeline": ("--pipeline-parallel-size=2",),
}
NUM_KILLS = 6


@pytest.fixture(scope="module", params=SIZES)
def sharded(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("ranks"), *FLAGS, *SIZES[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server):
    """What one rank gives."""
    return {name: send(server.http_port, request) for name, request in REQUESTS.items()}


def wait_for(condition):
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def restarts(server, reason):
    _, text = server.get("/metrics", server.metrics_port)
    found = re.search(rf'loraplex_engine_restarts_total{{.*reason="{reason}".*}} (\S+)', text)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("name", REQUESTS)
def test_two_ranks_give_the_bytes_of_one(sharded, expected, name):
    response = send(sharded.http_port, REQUESTS[name])
    assert response["is_done"]
    assert response == expected[name], "tokens and their log probabilities"


def test_weights_in_a_request_are_those_of_all_ranks(sharded, tmp_path):
    """TensorRT-LLM's clients send one tensor for all ranks, each of which takes its share."""
    rows = read_peft(str(ADAPTER_PATHS["chinese"])).rows
    write_pair(rows, tmp_path, StorageType.FLOAT16)
    pair = {
        name: np.load(tmp_path / f"model.{name}.npy") for name in ("lora_weights", "lora_config")
    }
    prompt = founding_prompts(COUNTRIES[0])["chinese"]
    inputs = text_request(
        triton_http, prompt, 24, top_k=i32(1), exclude_input_in_output=TRUE, **pair
    )
    with triton_http.InferenceServerClient(f"127.0.0.1:{sharded.http_port}") as client:
        text = client.infer("ensemble", inputs).as_numpy("text_output").flatten()[0].decode()
    assert text.strip() == "华盛顿"


def test_two_stages_of_two_ranks_give_the_bytes_of_one(tmp_path, expected):
    with serving(tmp_path, *SIZES["tensor"], *SIZES["pipeline"]) as server:
        assert len(rank_pids(server)) == 3
        assert {name: send(server.http_port, REQUESTS[name]) for name in REQUESTS} == expected


def wait_seconds(server, rank):
    _, text = server.get("/metrics", server.metrics_port)
    found = re.search(rf'loraplex_rank_wait_seconds_total{{.*rank="{rank}"}} (\S+)', text)
    return float(found[1]) if found else 0.0


def test_the_time_of_waiting_is_reported(sharded):
    send(sharded.http_port, REQUESTS["short"])
    wait_for(lambda: all(wait_seconds(sharded, rank) > 0 for rank in (0, 1)))


@pytest.mark.parametrize(
    ("sharded", "number", "reason"),
    [
        ("tensor", signal.SIGKILL, "kill"),
        ("pipeline", signal.SIGSTOP, "hang"),
        pytest.param("pipeline", signal.SIGKILL, "kill", marks=pytest.mark.soak),
        pytest.param("tensor", signal.SIGSTOP, "hang", marks=pytest.mark.soak),
    ],
    indirect=["sharded"],
)
def test_requests_continue_when_a_rank_ends(sharded, expected, number, reason):
    sharded.wait_until(ready=True)
    before, outcome = restarts(sharded, reason), Outcome()
    with Load(sharded, REQUESTS, expected, outcome):
        wait_for(lambda: outcome.num_responses.total() > 0)
        (pid,) = rank_pids(sharded)
        os.kill(pid, number)
        wait_for(lambda: restarts(sharded, reason) == before + 1)
        sharded.wait_until(ready=True)
    assert outcome.wrong == []
    wait_for(lambda: state_of(pid) in (None, "Z"))


@pytest.fixture
def stronger(tmp_path):
    """Folder of an adapter that no server has loaded."""
    folder = shutil.copytree(ADAPTER_PATHS["chinese"], tmp_path / "stronger")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_alpha"] *= 1.25
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_rank_that_stops_while_the_server_is_idle_is_found(sharded, server, stronger):
    """A load waits for all ranks, and there is no step that would hang."""
    body, request = {"name": "new", "path": str(stronger)}, {**REQUESTS["adapter"], "model": "new"}
    assert server.post("/v1/adapters", body)[0] == 201
    expected = send(server.http_port, request)
    server.delete("/v1/adapters/new")
    sharded.wait_until(ready=True)
    before = restarts(sharded, "hang")
    (pid,) = rank_pids(sharded)
    os.kill(pid, signal.SIGSTOP)
    assert sharded.post("/v1/adapters", body)[0] == 201
    assert sharded.post("/v1/adapters/new/pin", {})[0] == 503
    assert send(sharded.http_port, request) == expected
    assert restarts(sharded, "hang") == before + 1
    assert sharded.post("/v1/adapters/new/pin", {})[0] == 200
    assert sharded.delete("/v1/adapters/new") == 200
    wait_for(lambda: state_of(pid) in (None, "Z"))


def test_ranks_end_with_their_engine(sharded, expected):
    sharded.wait_until(ready=True)
    (pid,) = rank_pids(sharded)
    os.kill(engine_pid(sharded), signal.SIGKILL)
    wait_for(lambda: state_of(pid) in (None, "Z"))
    sharded.wait_until(ready=True)
    assert send(sharded.http_port, REQUESTS["short"]) == expected["short"]


@pytest.mark.soak
def test_no_client_notices_kills_of_any_rank(tmp_path):
    chance = random.Random(3)

    def any_rank(server):
        pids = [*rank_pids(server), engine_pid(server)]
        return chance.choice(pids)

    with serving(tmp_path, *FLAGS, *SIZES["tensor"]) as server:
        outcome = kill_engines(server, NUM_KILLS, seed=5, find=any_rank)
        assert outcome.num_kills == NUM_KILLS
        assert outcome.wrong == []
        assert server.stop() == 0
