"""Clients that leave a real server, at every stage and over every protocol: slots are freed."""

import http.client
import json
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from loraplex.testing.running_server import RunningServer, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("disconnects")]

LONG = 200
"""Tokens; a prompt of so many is computed in as many steps."""
ENDLESS = 1500
WAIT_SECONDS = 60
NUM_TRIES = 3
"""Attempts of a case: on a slow machine a request may end before its client leaves."""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    """One slot, and a token a step: every stage lasts."""
    flags = ["--max-num-seqs", "1", "--max-prefill-chunk", "1", "--no-prefix-cache"]
    flags += ["--iter-stats-max-iterations", "10000"]
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        yield running
        assert running.stop() == 0


def steps(server: RunningServer) -> list[dict]:
    return json.loads(server.get("/v1/iterations?limit=10000")[1])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


class OverHttp:
    """A request on a connection that is closed."""

    def __init__(self, server: RunningServer, path: str, body: dict) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), headers)

    def leave(self) -> None:
        self._connection.close()


def openai_body(prompt: str, *, stream: bool) -> dict:
    body = {"model": "capitals", "prompt": prompt, "max_tokens": ENDLESS, "temperature": 0}
    return {**body, "ignore_eos": True, "stream": stream}


def openai_plain(server, prompt):
    return OverHttp(server, "/v1/completions", openai_body(prompt, stream=False))


def openai_stream(server, prompt):
    return OverHttp(server, "/v1/completions", openai_body(prompt, stream=True))


def triton_generate(server, prompt):
    body = {"text_input": prompt, "max_tokens": ENDLESS, "end_id": -1}
    return OverHttp(server, "/v2/models/ensemble/generate", body)


class OverGrpc:
    """A call that is cancelled."""

    def __init__(self, server: RunningServer, prompt: str, *, stream: bool) -> None:
        self._client = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        arrays = {
            "text_input": np.array([[prompt.encode()]], dtype=object),
            "max_tokens": np.array([[ENDLESS]], dtype=np.int32),
            "end_id": np.array([[-1]], dtype=np.int32),
            "stream": np.array([[stream]]),
        }
        types = {"O": "BYTES", "i": "INT32", "b": "BOOL"}
        inputs = []
        for name, array in arrays.items():
            inputs.append(triton_grpc.InferInput(name, array.shape, types[array.dtype.kind]))
            inputs[-1].set_data_from_numpy(array)
        self._call = None
        if stream:
            self._client.start_stream(lambda result, error: None)
            self._client.async_stream_infer("ensemble", inputs)
        else:
            self._call = self._client.async_infer("ensemble", inputs, lambda result, error: None)

    def leave(self) -> None:
        if self._call is None:
            self._client.stop_stream(cancel_requests=True)
        else:
            self._call.cancel()
        self._client.close()


def grpc_unary(server, prompt):
    return OverGrpc(server, prompt, stream=False)


def grpc_stream(server, prompt):
    return OverGrpc(server, prompt, stream=True)


PROTOCOLS = [openai_plain, openai_stream, triton_generate, grpc_unary, grpc_stream]


def rows_of_others(server: RunningServer, known: set[int]) -> list[dict]:
    """The steps since then with rows of requests that are not known."""
    return [step for step in steps(server) if {*step["request_ids"]} - known]


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("send", PROTOCOLS)
def test_the_slot_is_free_again(server, send, stage):
    for _ in range(NUM_TRIES):
        left = steps_of_the_client_that_left(server, send, stage)
        if len(left) < ENDLESS:
            break
    assert len(left) < ENDLESS, "a request that was left ran to its end"
    if stage == "queued":
        assert len({request_id for step in left for request_id in step["request_ids"]}) == 1


def steps_of_the_client_that_left(server: RunningServer, send: Callable, stage: str) -> list[dict]:
    """Return the steps of the client that left at this stage and of the one that blocked it."""
    known = {request_id for step in steps(server) for request_id in step["request_ids"]}
    blocker = openai_stream(server, "b") if stage == "queued" else None
    if blocker is not None:
        wait_for(lambda: len(rows_of_others(server, known)) > 0)
    client = send(server, "city " * LONG if stage == "prefill" else "c")
    if stage == "queued":
        wait_for(lambda: steps(server)[-1]["num_waiting"] == 1)
    else:
        num_steps = LONG // 10 if stage == "prefill" else 10
        wait_for(lambda: len(rows_of_others(server, known)) > num_steps)
    client.leave()
    if blocker is not None:
        wait_for(lambda: steps(server)[-1]["num_waiting"] == 0)
        blocker.leave()
    status, _ = server.post(
        "/v1/completions", {"model": "capitals", "prompt": "d", "max_tokens": 1}
    )
    assert status == 200
    rows = rows_of_others(server, known)
    assert (rows[-1]["num_running"], rows[-1]["num_waiting"]) == (1, 0)
    (last,) = rows[-1]["request_ids"]
    return [step for step in rows if last not in step["request_ids"]]
