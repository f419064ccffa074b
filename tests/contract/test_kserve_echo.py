"""The Triton front ends as their real client sees them: tritonclient over sockets.

Behind them is an EchoBackend: a token is a byte, the answer to "hi" is "echo: hi".
"""

import asyncio
import functools
import gzip
import json
import queue
import socket
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from loraplex.core.errors import InternalError, QueueFullError, UnauthenticatedError
from loraplex.core.principal import LOCAL
from loraplex.testing.echo_backend import EchoBackend
from loraplex.testing.served_triton import ServedTriton, served_triton

EOS = 257
TIMEOUT_SECONDS = 10


@pytest.fixture
def backend() -> EchoBackend:
    backend = EchoBackend(("echo", "other/echo"))
    backend.register("sheep", task_id=0)
    backend.register("goat", task_id=2**63 + 1)
    return backend


@pytest.fixture
def triton(backend: EchoBackend) -> Iterator[ServedTriton]:
    with served_triton(backend) as triton:
        yield triton
    assert triton.service.num_active == 0


@pytest.fixture
def http_client(triton: ServedTriton) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(triton.http) as client:
        yield client


@pytest.fixture
def grpc_client(triton: ServedTriton) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        yield client


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def wire(request, triton) -> Iterator[tuple[ModuleType, Any]]:
    """A tritonclient module and its client."""
    address = triton.http if request.param is tritonclient.http else triton.grpc
    with request.param.InferenceServerClient(address) as client:
        yield request.param, client


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def tensors(module: ModuleType, **arrays: np.ndarray) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def i32(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.int32)


def text_request(module: ModuleType, prompt: str = "hi", max_tokens: int = 50, **more) -> list[Any]:
    text = np.array([[prompt]], dtype=object)
    return tensors(module, text_input=text, max_tokens=i32(max_tokens), **more)


def token_request(module: ModuleType, prompt: bytes = b"hi", length: int = 50, **more) -> list[Any]:
    """What inflight_batcher_llm_client.py always sends."""
    more.setdefault("end_id", i32(EOS))
    return tensors(
        module,
        input_ids=i32(*prompt),
        input_lengths=i32(len(prompt)),
        request_output_len=i32(length),
        beam_width=i32(1),
        temperature=np.array([[1.0]], dtype=np.float32),
        pad_id=i32(258),
        runtime_top_k=i32(1),
        runtime_top_p=np.array([[0.0]], dtype=np.float32),
        **more,
    )


TRUE = np.array([[True]])


class Stream:
    """One bidirectional stream, its answers in a queue."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        self.answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        client.start_stream(
            callback=lambda result, error: self.answers.put((result, error)), **options
        )

    def send(self, model: str, inputs: list[Any], **options: Any) -> None:
        self.client.async_stream_infer(model, inputs, **options)

    def next(self) -> Any:
        result, error = self.answers.get(timeout=TIMEOUT_SECONDS)
        if error is not None:
            raise error
        return result

    def until_final(self) -> list[Any]:
        results = [self.next()]
        while not is_final(results[-1]):
            results.append(self.next())
        return results


def is_final(result: Any) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


def text_of(results: list[Any]) -> str:
    return b"".join(result.as_numpy("text_output")[0] for result in results).decode()


# ---------------------------------------------------------------- server and models


def test_health_is_the_truth(backend, wire):
    _, client = wire
    ready = ["ensemble", "tensorrt_llm", "echo"]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert [name for name in [*ready, "nope"] if client.is_model_ready(name)] == ready
    assert not client.is_model_ready("ensemble", "2")
    backend.unready_reason = "the engine restarts"
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("ensemble")


def test_metadata_is_the_same_over_both_wires(http_client, grpc_client):
    as_json = functools.partial(grpc_client.get_model_metadata, as_json=True)
    for model in ("ensemble", "tensorrt_llm"):
        over_http = http_client.get_model_metadata(model)
        over_grpc = as_json(model)
        assert over_http["name"] == over_grpc["name"] == model
        for side in ("inputs", "outputs"):
            shapes = {row["name"]: [int(n) for n in row["shape"]] for row in over_grpc[side]}
            assert {row["name"]: row["shape"] for row in over_http[side]} == shapes
    assert http_client.get_server_metadata()["name"] == grpc_client.get_server_metadata().name


def test_configuration(http_client, grpc_client):
    config = http_client.get_model_config("tensorrt_llm")
    proto = grpc_client.get_model_config("tensorrt_llm").config
    assert config["max_batch_size"] == proto.max_batch_size == 128
    assert [row["name"] for row in config["input"]] == [row.name for row in proto.input]
    assert proto.input[0].allow_ragged_batch
    assert proto.input[3].HasField("reshape")
    assert config["backend"] == proto.backend == "tensorrtllm"


def test_repository_index(backend, http_client, grpc_client):
    names = ["ensemble", "tensorrt_llm", "echo", "other/echo"]
    assert [row["name"] for row in http_client.get_model_repository_index()] == names
    backend.unready_reason = "loading"
    models = grpc_client.get_model_repository_index().models
    assert [(m.state, m.reason) for m in models] == [("UNAVAILABLE", "loading")] * 4


def test_statistics_count_truly(wire):
    module, client = wire
    client.infer("ensemble", text_request(module))
    with pytest.raises(InferenceServerException):
        client.infer("ensemble", text_request(module, max_tokens=0))
    stats = client.get_inference_statistics("ensemble")
    row = stats["model_stats"][0] if isinstance(stats, dict) else stats.model_stats[0]
    if not isinstance(row, dict):
        assert (row.inference_count, row.inference_stats.fail.count) == (1, 1)
    else:
        assert (row["inference_count"], row["inference_stats"]["fail"]["count"]) == (1, 1)


def test_unknown_paths_and_methods(triton):
    with httpx.Client(base_url=f"http://{triton.http}") as http:
        missing = http.get("/v2/nothing/here")
        assert (missing.status_code, missing.json()) == (404, {"error": "Not Found"})
        wrong = http.get("/v2/models/ensemble/infer")
        assert (wrong.status_code, wrong.json()) == (405, {"error": "Method Not Allowed"})
        assert http.get("/v2/models/other/echo").json()["name"] == "other/echo"


@pytest.mark.parametrize("rpc", ["RepositoryModelLoad", "SystemSharedMemoryStatus", "LogSettings"])
def test_unserved_rpcs_say_why(triton, rpc):
    requests = {
        "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest,
        "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest,
        "LogSettings": service_pb2.LogSettingsRequest,
    }
    with grpc.insecure_channel(triton.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            getattr(stub, rpc)(requests[rpc]())
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details()


# ---------------------------------------------------------------- unary inference


def test_text(wire):
    module, client = wire
    result = client.infer("ensemble", text_request(module), request_id="abc")
    assert result.as_numpy("text_output").tolist() == [b"hiecho: hi"]
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "abc"


def test_text_without_the_prompt_and_with_an_adapter(wire):
    module, client = wire
    more = {"exclude_input_in_output": TRUE, "lora_task_id": np.array([[0]], dtype=np.uint64)}
    result = client.infer("ensemble", text_request(module, **more))
    assert result.as_numpy("text_output").tolist() == [b"echo+sheep: hi"]
    more["lora_task_id"] = np.array([[2**63 + 1]], dtype=np.uint64)
    result = client.infer("other/echo", text_request(module, exclude_input_in_output=TRUE))
    assert result.as_numpy("text_output").tolist() == [b"other/echo: hi"]
    result = client.infer("echo", text_request(module, **more))
    assert result.as_numpy("text_output").tolist() == [b"echo+goat: hi"]


def test_token_ids(wire):
    module, client = wire
    result = client.infer("tensorrt_llm", token_request(module), parameters={"Streaming": False})
    assert bytes(result.as_numpy("output_ids")[0, 0].tolist()) == b"hiecho: hi"
    assert result.as_numpy("output_ids").shape == (1, 1, 10)
    assert result.as_numpy("sequence_length").tolist() == [[10]]
    response = result.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    first = outputs[0]
    assert (first["name"] if isinstance(first, dict) else first.name) == "output_ids"


def test_without_end_id_token_ids_run_to_their_length(wire):
    module, client = wire
    result = client.infer("tensorrt_llm", token_request(module, length=20, end_id=i32(-1)))
    assert result.as_numpy("sequence_length").tolist() == [[22]]


def test_log_probs_and_requested_outputs(wire):
    module, client = wire
    wanted = ["cum_log_probs", "output_log_probs", "sequence_length"]
    result = client.infer(
        "tensorrt_llm",
        token_request(module, return_log_probs=TRUE, exclude_input_in_output=TRUE),
        outputs=[module.InferRequestedOutput(name) for name in wanted],
    )
    log_probs = result.as_numpy("output_log_probs")
    assert log_probs.shape == (1, 1, 8)
    assert result.as_numpy("cum_log_probs").tolist() == [[log_probs.sum()]]
    assert result.as_numpy("output_ids") is None


def test_batch_and_sequences_are_stacked(wire):
    module, client = wire
    texts = np.array([["a"], ["bcd"]], dtype=object)
    many = tensors(module, text_input=texts, max_tokens=np.full((2, 1), 50, dtype=np.int32))
    result = client.infer("ensemble", many)
    assert result.as_numpy("text_output").tolist() == [b"aecho: a", b"bcdecho: bcd"]
    two = token_request(module, num_return_sequences=i32(2), exclude_input_in_output=TRUE)
    result = client.infer("tensorrt_llm", two)
    assert result.as_numpy("sequence_length").tolist() == [[8, 11]]
    assert result.as_numpy("output_ids").shape == (1, 2, 11)
    assert result.as_numpy("output_ids")[0, 0, 8:].tolist() == [-1, -1, -1]


def test_stop_words_are_kept_in_the_answer(wire):
    module, client = wire
    words = np.array([["", ": "]], dtype=object)
    result = client.infer("ensemble", text_request(module, stop_words=words))
    assert result.as_numpy("text_output").tolist() == [b"hiecho: "]
    # the words "h" and "o:" of a [2, n] list; "h" comes first
    listed = np.array([[[104, 111, 58], [1, 3, -1]]], dtype=np.int32)
    result = client.infer("tensorrt_llm", token_request(module, stop_words_list=listed))
    assert bytes(result.as_numpy("output_ids")[0, 0].tolist()) == b"hiech"


def test_json_tensors_and_compression(http_client):
    inputs = [
        tritonclient.http.InferInput("text_input", [1, 1], "BYTES"),
        tritonclient.http.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([["é"]], dtype=object), binary_data=False)
    inputs[1].set_data_from_numpy(i32(50), binary_data=False)
    outputs = [tritonclient.http.InferRequestedOutput("text_output", binary_data=False)]
    for algorithm in (None, "gzip", "deflate"):
        result = http_client.infer(
            "ensemble",
            inputs,
            outputs=outputs,
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert result.as_numpy("text_output").tolist() == ["éecho: é"]


def test_a_bomb_is_not_unpacked(triton):
    bomb = gzip.compress(b" " * (65 * 2**20))
    response = httpx.post(
        f"http://{triton.http}/v2/models/ensemble/infer",
        content=bomb,
        headers={"Content-Encoding": "gzip"},
    )
    assert response.status_code == 413


# ---------------------------------------------------------------- generate


@pytest.fixture
def http(triton: ServedTriton) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{triton.http}/v2/models/ensemble") as http:
        yield http


def test_generate(http):
    body = {"text_input": "hi", "max_tokens": 50, "bad_words": "", "stop_words": "", "id": "x"}
    answer = http.post("/generate", json=body).json()
    assert answer.pop("text_output") == "hiecho: hi"
    assert answer == {
        "id": "x",
        "model_name": "ensemble",
        "model_version": "1",
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
    }


def test_generate_tells_the_adapter_and_reads_nested_parameters(http):
    inner = {"max_tokens": 50, "lora_task_id": 0, "return_log_probs": True, "whatever": 1}
    answer = http.post("/generate", json={"text_input": "hi", "parameters": inner}).json()
    assert answer["text_output"] == "hiecho+sheep: hi"
    assert answer["adapter"] == "sheep"
    assert len(answer["output_log_probs"]) == 14


def test_generate_does_not_stream(http):
    response = http.post("/generate", json={"text_input": "a", "max_tokens": 1, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"].startswith("generate expects model to produce exactly 1 resp")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_generate_stream(http):
    body = {"text_input": "hé", "max_tokens": 50, "stream": True}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        texts = [event["text_output"] for event in events(response)]
    assert "".join(texts) == "echo: hé"
    assert len(texts) > 2
    with http.stream("POST", "/generate_stream", json={**body, "stream": False}) as response:
        assert [event["text_output"] for event in events(response)] == ["héecho: hé"]


@pytest.mark.parametrize(("after_outputs", "status"), [(0, 500), (2, 200)])
def test_an_error_in_a_stream(backend, http, after_outputs, status):
    backend.plant(InternalError("broken"), after_outputs=after_outputs)
    body = {"text_input": "hi", "max_tokens": 50, "stream": True}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == status
        assert events(response)[-1] == {"error": "broken"}


def test_an_error_before_a_stream_is_plain_json(backend, http):
    backend.plant(QueueFullError("full", retry_after_seconds=2))
    response = http.post("/generate_stream", json={"text_input": "hi", "max_tokens": 5})
    assert response.status_code == 503
    assert response.json()["error"].endswith("full")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_a_client_that_goes_aborts_its_request(backend, triton, action):
    backend.delay_seconds = 0.01
    body = {"text_input": "hi", "max_tokens": 1000, "end_id": -1, "stream": action != "generate"}
    if action == "infer":
        rows = {
            "text_input": ("BYTES", "hi"),
            "max_tokens": ("INT32", 9999),
            "end_id": ("INT32", -1),
        }
        inputs = [
            {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
            for name, (datatype, value) in rows.items()
        ]
        body = {"inputs": inputs}
    content = json.dumps(body).encode()
    host, port = triton.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v2/models/ensemble/{action} HTTP/1.1\r\nHost: x\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert eventually(lambda: len(backend.requests) == 1)
    assert eventually(lambda: len(backend.aborted) == 1)
    assert backend.finished == []


# ---------------------------------------------------------------- gRPC streams


def test_stream_of_tokens(grpc_client):
    stream = Stream(grpc_client)
    stream.send("tensorrt_llm", token_request(tritonclient.grpc, streaming=TRUE), request_id="r")
    results = stream.until_final()
    ids = [i for result in results for i in result.as_numpy("output_ids")[0, 0].tolist()]
    assert bytes(ids) == b"echo: hi"
    assert {result.get_response().id for result in results} == {"r"}
    assert len(results) > 5


def test_an_unstreamed_request_over_a_stream(grpc_client):
    stream = Stream(grpc_client)
    stream.send("ensemble", text_request(tritonclient.grpc), enable_empty_final_response=True)
    assert text_of(stream.until_final()) == "hiecho: hi"


def test_requests_of_one_stream_run_at_the_same_time(backend, grpc_client):
    backend.delay_seconds = 0.01
    stream = Stream(grpc_client)
    slow = text_request(tritonclient.grpc, max_tokens=40, end_id=i32(-1), stream=TRUE)
    stream.send("ensemble", slow, request_id="slow")
    stream.send("ensemble", text_request(tritonclient.grpc, "a", max_tokens=2), request_id="fast")
    order = []
    while len(order) < 2:
        result = stream.next()
        if is_final(result):
            order.append(result.get_response().id)
    assert order == ["fast", "slow"]


def test_batches_and_sequences_over_a_stream_are_tagged(grpc_client):
    stream = Stream(grpc_client)
    texts = np.array([["a"], ["b"]], dtype=object)
    both = np.full((2, 1), 50, dtype=np.int32)
    many = tensors(
        tritonclient.grpc, text_input=texts, max_tokens=both, num_return_sequences=both // 25
    )
    stream.send("ensemble", many)
    results = stream.until_final()
    found = {
        (int(r.as_numpy("batch_index")[0, 0]), int(r.as_numpy("sequence_index")[0, 0])): text_of(
            [r]
        )
        for r in results
    }
    assert found == {
        (0, 0): "aecho: a",
        (0, 1): "aecho: a #1",
        (1, 0): "becho: b",
        (1, 1): "becho: b #1",
    }
    assert [is_final(r) for r in results] == [False, False, False, True]


def test_a_failed_request_leaves_the_stream_open(grpc_client):
    stream = Stream(grpc_client)
    stream.send("ensemble", text_request(tritonclient.grpc, max_tokens=0), request_id="bad")
    with pytest.raises(InferenceServerException, match="max_tokens must be in"):
        stream.next()
    stream.send("ensemble", text_request(tritonclient.grpc), request_id="good")
    assert text_of(stream.until_final()) == "hiecho: hi"


def test_errors_end_the_stream_if_the_client_says_so(grpc_client):
    stream = Stream(grpc_client, headers={"triton_grpc_error": "true"})
    stream.send("nope", text_request(tritonclient.grpc))
    with pytest.raises(InferenceServerException) as raised:
        stream.next()
    assert raised.value.status() == "StatusCode.NOT_FOUND"


def test_cancelling_a_stream_aborts_its_requests(backend, grpc_client):
    backend.delay_seconds = 0.01
    stream = Stream(grpc_client)
    endless = {"max_tokens": 5000, "end_id": i32(-1), "stream": TRUE}
    for prompt in ("a", "b"):
        stream.send("ensemble", text_request(tritonclient.grpc, prompt, **endless))
    stream.next()
    assert eventually(lambda: len(backend.requests) == 2)
    grpc_client.stop_stream(cancel_requests=True)
    assert eventually(lambda: sorted(backend.aborted) == [1, 2])
    assert backend.finished == []


def test_cancelling_a_unary_call_aborts_its_request(backend, grpc_client):
    backend.delay_seconds = 0.01
    ended: queue.Queue[Exception | None] = queue.Queue()
    call = grpc_client.async_infer(
        "ensemble",
        text_request(tritonclient.grpc, max_tokens=5000, end_id=i32(-1)),
        callback=lambda result, error: ended.put(error),
    )
    assert eventually(lambda: len(backend.requests) == 1)
    call.cancel()
    assert ended.get(timeout=TIMEOUT_SECONDS).status() == "StatusCode.CANCELLED"
    assert eventually(lambda: backend.aborted == [1])


def test_a_client_that_does_not_read_holds_nobody_up(backend, triton):
    with grpc.insecure_channel(triton.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="ensemble")
        text = ("text_input", "BYTES", {"bytes_contents": [b"x" * 2000]})
        limit = ("max_tokens", "INT32", {"int_contents": [2000]})
        flag = ("stream", "BOOL", {"bool_contents": [True]})
        for name, datatype, contents in (text, limit, flag):
            request.inputs.add(name=name, datatype=datatype, shape=[1, 1], contents=contents)
        unread = stub.ModelStreamInfer(iter([request] * 8))
        assert eventually(lambda: len(backend.requests) == 8)
        with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
            result = client.infer("ensemble", text_request(tritonclient.grpc), client_timeout=5)
            assert result.as_numpy("text_output").tolist() == [b"hiecho: hi"]
        unread.cancel()
    assert eventually(lambda: triton.service.num_active == 0)


async def test_aio_client(triton):
    async def requests():
        inputs = text_request(tritonclient.grpc, "async", stream=TRUE)
        yield {"model_name": "ensemble", "inputs": inputs, "request_id": "1"}

    async with tritonclient.grpc.aio.InferenceServerClient(triton.grpc) as client:
        assert await client.is_server_ready()
        results = [result async for result, _ in client.stream_infer(requests())]
        assert text_of(results) == "echo: async"
        calls = [
            client.infer("ensemble", text_request(tritonclient.grpc, str(n))) for n in range(8)
        ]
        answers = [result.as_numpy("text_output")[0] for result in await asyncio.gather(*calls)]
    assert answers == [f"{n}echo: {n}".encode() for n in range(8)]


# ---------------------------------------------------------------- stop requests


def stop_request() -> list[Any]:
    core = {"input_ids": i32(0), "input_lengths": i32(1), "request_output_len": i32(0)}
    return tensors(tritonclient.grpc, **core, stop=TRUE)


@pytest.mark.parametrize("request_id", ["7", ""])
def test_stop_over_the_same_stream(backend, grpc_client, request_id):
    backend.delay_seconds = 0.01
    stream = Stream(grpc_client)
    endless = token_request(tritonclient.grpc, length=4000, end_id=i32(-1), streaming=TRUE)
    stream.send("tensorrt_llm", endless, request_id=request_id)
    assert not is_final(stream.next())
    stream.send("tensorrt_llm", stop_request(), request_id=request_id)
    results = [*stream.until_final(), *stream.until_final()]
    finals = [result for result in results if is_final(result)]
    shapes = [r.as_numpy("output_ids") is None or r.as_numpy("output_ids").shape for r in finals]
    assert sorted(shapes, key=str) == [(1, 1, 0), True], "the stopped one, and the stopper's own"
    assert eventually(lambda: backend.aborted == [1])


def test_a_stopped_unary_request_answers_with_what_it_has(backend, triton, grpc_client):
    backend.delay_seconds = 0.01
    ended: queue.Queue[tuple[Any, Any]] = queue.Queue()
    grpc_client.async_infer(
        "ensemble",
        text_request(tritonclient.grpc, max_tokens=4000, end_id=i32(-1)),
        request_id="victim",
        callback=lambda result, error: ended.put((result, error)),
    )
    assert eventually(lambda: triton.service.num_active == 1)
    answer = grpc_client.infer("tensorrt_llm", stop_request(), request_id="victim")
    assert list(answer.get_response().outputs) == []
    result, error = ended.get(timeout=TIMEOUT_SECONDS)
    assert error is None
    assert result.as_numpy("text_output")[0].startswith(b"hi")
    assert eventually(lambda: backend.aborted == [1])


def test_stopping_an_unknown_request_is_fine(grpc_client):
    answer = grpc_client.infer("tensorrt_llm", stop_request(), request_id="long gone")
    assert list(answer.get_response().outputs) == []


# ---------------------------------------------------------------- who asks


def test_authentication_reads_headers_and_metadata(backend):
    def authenticate(headers):
        if headers.get("authorization") != "Bearer right":
            raise UnauthenticatedError("the key is not known")
        return LOCAL

    with served_triton(backend, authenticate=authenticate) as triton:
        for module, address, status in (
            (tritonclient.http, triton.http, "401"),
            (tritonclient.grpc, triton.grpc, "StatusCode.UNAUTHENTICATED"),
        ):
            with module.InferenceServerClient(address) as client:
                with pytest.raises(InferenceServerException) as raised:
                    client.infer("ensemble", text_request(module))
                assert raised.value.status() == status
                headers = {"authorization": "Bearer right"}
                client.infer("ensemble", text_request(module), headers=headers)
