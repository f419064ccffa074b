"""Replicas on a real Ray cluster: faults and changes of their number, under load."""

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import ray
from ray import serve

from loraplex.core.errors import ConfigError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.deploy.arguments import read_arguments
from loraplex.deploy.ray import INGRESS, REPLICA, app, replica_options

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]
NODE_CPUS = 4
START_SECONDS = 240
NAMES = ("capitals", *ADAPTER_PATHS)


class Stream(NamedTuple):
    text: str
    last: str
    """Data of the last event."""


class Application:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._pool = ThreadPoolExecutor(64)

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=START_SECONDS)

    def stream(self, model: str, seed: int, on_event: Callable[[], None]) -> Stream:
        body = {
            "model": model,
            "prompt": "Paris",
            "max_tokens": 40,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
        }
        text, last = "", ""
        with self.post("/v1/completions", body) as response:
            for line in response:
                if line.startswith(b"data: "):
                    on_event()
                    last = line.removeprefix(b"data: ").decode().strip()
                    if last.startswith("{") and "choices" in (chunk := json.loads(last)):
                        text += chunk["choices"][0]["text"]
        return Stream(text, last)

    def streams(
        self, count: int, on_event: Callable[[], None] = lambda: None
    ) -> list[Future[Stream]]:
        """Begin streams of all models and adapters in turn, each with its own seed."""
        return [
            self._pool.submit(self.stream, NAMES[i % len(NAMES)], i, on_event) for i in range(count)
        ]

    def undisturbed(self, count: int) -> list[Stream]:
        return [stream.result() for stream in self.streams(count)]


@pytest.fixture(scope="module")
def application(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """One or two replicas with four slots each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    scaling = {"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 0.5}
    arguments = {
        "model": str(BASE_PATH),
        "name": "capitals",
        "adapters": {name: str(path) for name, path in ADAPTER_PATHS.items()},
        "max_num_seqs": 4,
        "max_body_bytes": "512KiB",
        "state_dir": str(tmp_path_factory.mktemp("state")),
        "min_replicas": 1,
        "max_replicas": 2,
        "deployment_config": {
            "autoscaling_config": {**scaling, "look_back_period_s": 2},
            "ray_actor_options": {"num_cpus": 1},
        },
    }
    serve.run(app(arguments))
    try:
        yield Application(port)
    finally:
        serve.shutdown()


def replica_pids(deployment: str = REPLICA) -> list[int]:
    """Processes of replicas of the clusters that this process started."""
    title = f"ray::ServeReplica:default:{deployment}"
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                found.append(process.pid)
    return found


def num_running() -> int:
    deployment = serve.status().applications["default"].deployments[REPLICA]
    return deployment.replica_states.get("RUNNING", 0)


def num_requests() -> int:
    """Requests that the replicas have, as they report it."""
    names = [name for name in ray.util.list_named_actors(True) if REPLICA in name["name"]]
    replicas = [ray.get_actor(name["name"], name["namespace"]) for name in names]
    reports = ray.get([replica.record_routing_stats.remote() for replica in replicas])
    return sum(report["num_requests"] for report in reports)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.2)


def under_load(
    application: Application, condition: Callable[[], bool], what: str
) -> list[Future[Stream]]:
    """Keep six to twelve streams running until the condition holds; returns all of them."""
    begun: list[Future[Stream]] = []

    def is_met() -> bool:
        if sum(not stream.done() for stream in begun) < 6:
            begun.extend(application.streams(6))
        return condition()

    wait_until(is_met, what)
    return begun


def test_routes_of_every_front_end_work(application: Application) -> None:
    completion = {"model": "capitals:chinese", "prompt": "x", "max_tokens": 4}
    with application.post("/v1/completions", completion) as response:
        assert response.headers["x-loraplex-adapter"]
    inputs = {"text_input": "x", "max_tokens": 4}
    with application.post("/v2/models/tensorrt_llm_bls/generate", inputs) as response:
        assert json.load(response)["text_output"]
    with pytest.raises(urllib.error.HTTPError) as unknown:
        application.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert unknown.value.code == 404
    assert "model_not_found" in unknown.value.read().decode()
    with pytest.raises(urllib.error.HTTPError) as large:
        application.post("/v1/completions", {"model": "capitals", "prompt": "x" * (1 << 20)})
    assert large.value.code == 413


def test_a_client_that_disconnects_aborts_its_request(application: Application) -> None:
    body = {"model": "capitals", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    with application.post("/v1/completions", {**body, "stream": True}) as response:
        response.readline()
        wait_until(lambda: num_requests() == 1, "a report of the request")
    wait_until(lambda: num_requests() == 0, "the abort")


def test_replicas_come_and_go_under_load_without_a_lost_stream(application: Application) -> None:
    expected = application.undisturbed(12)
    begun = under_load(application, lambda: num_running() >= 2, "a second replica")
    wait_until(lambda: all(stream.done() for stream in begun), "the end of all streams")
    # One stream at a time needs one replica: the others drain and leave.
    while num_running() > 1:
        begun += application.streams(1)
        begun[-1].result()
    texts = {stream.text for stream in expected}
    for stream in (future.result() for future in begun):
        assert stream.last == "[DONE]"
        assert stream.text in texts


def test_streams_of_a_killed_replica_continue_exactly(application: Application) -> None:
    expected = application.undisturbed(12)
    under_load(application, lambda: num_running() >= 2, "a second replica")
    num_events = 0

    def count() -> None:
        nonlocal num_events
        num_events += 1

    streams = application.streams(12, count)
    wait_until(lambda: num_events > 40, "streams")
    victims = replica_pids()
    assert len(victims) >= 2
    psutil.Process(victims[0]).kill()
    assert [stream.result() for stream in streams] == expected


def test_the_only_replica_is_replaced_and_streams_continue_there(application: Application) -> None:
    expected = application.undisturbed(3)
    wait_until(lambda: num_running() == 1 and len(replica_pids()) == 1, "one replica")
    events: list[int] = []
    streams = application.streams(3, lambda: events.append(1))
    wait_until(lambda: len(events) > 9, "streams")
    psutil.Process(replica_pids()[0]).kill()
    assert [stream.result() for stream in streams] == expected


def test_a_stream_without_a_record_ends_with_an_error(application: Application) -> None:
    """Two prompts of one request have no fixed order."""
    body = {"model": "capitals", "prompt": ["x", "y"], "max_tokens": 400, "ignore_eos": True}
    wait_until(lambda: num_running() == 1 and len(replica_pids()) == 1, "one replica")
    with application.post("/v1/completions", {**body, "stream": True}) as response:
        lines = [response.readline() for _ in range(8)]
        psutil.Process(replica_pids()[0]).kill()
        lines += list(response)
    last = [line for line in lines if line.startswith(b"data: ")][-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_restarted"
    assert "several prompts" in error["message"]
    wait_until(lambda: num_running() >= 1, "the next replica")


def test_options_of_the_deployment_follow_from_settings() -> None:
    given = {"model": "m", "max_num_seqs": 8, "max_queue_size": 3, "shutdown_seconds": 7}
    options = replica_options(read_arguments({**given, "max_replicas": 2, "device": "cuda"}))
    assert options["max_ongoing_requests"] == 11
    assert options["graceful_shutdown_timeout_s"] == 7
    assert options["autoscaling_config"] == {"target_ongoing_requests": 8, "max_replicas": 2}
    assert options["ray_actor_options"] == {"num_gpus": 1}


def test_wrong_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_sequences is not a setting"):
        app({"model": str(tmp_path), "max_num_sequences": 3})


def test_the_ingress_is_one_deployment(application: Application) -> None:
    assert set(serve.status().applications["default"].deployments) == {INGRESS, REPLICA}
