"""Streams, cancellation and stop requests over gRPC, with tritonclient over sockets.

The backend is an EchoService: a token is a byte, and the output for "hi" is "echo: hi".
"""

import asyncio
import queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.eventually import TIMEOUT_SECONDS, eventually
from support.naming import naming
from support.triton_requests import TRUE, i32, tensors, text_request, token_request


class Stream:
    """One bidirectional stream, which collects its responses in a queue."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        self.responses: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        client.start_stream(
            callback=lambda result, error: self.responses.put((result, error)), **options
        )

    def send(self, model: str, inputs: list[Any], **options: Any) -> None:
        self.client.async_stream_infer(model, inputs, **options)

    def next(self) -> Any:
        result, error = self.responses.get(timeout=TIMEOUT_SECONDS)
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
    with pytest.raises(InferenceServerException, match=naming("max_tokens", 0)):
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
    endless = {"max_tokens": 4000, "end_id": i32(-1), "stream": TRUE}
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
        text_request(tritonclient.grpc, max_tokens=4000, end_id=i32(-1)),
        callback=lambda result, error: ended.put(error),
    )
    assert eventually(lambda: len(backend.requests) == 1)
    call.cancel()
    assert ended.get(timeout=TIMEOUT_SECONDS).status() == "StatusCode.CANCELLED"
    assert eventually(lambda: backend.aborted == [1])


def test_a_client_that_does_not_read_delays_no_other(backend, triton):
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
            result = client.infer("ensemble", text_request(tritonclient.grpc), client_timeout=60)
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
        responses = [result.as_numpy("text_output")[0] for result in await asyncio.gather(*calls)]
    assert responses == [f"{n}echo: {n}".encode() for n in range(8)]


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


def test_a_stopped_unary_request_returns_what_it_has(backend, triton, grpc_client):
    backend.delay_seconds = 0.01
    ended: queue.Queue[tuple[Any, Any]] = queue.Queue()
    grpc_client.async_infer(
        "ensemble",
        text_request(tritonclient.grpc, max_tokens=4000, end_id=i32(-1)),
        request_id="victim",
        callback=lambda result, error: ended.put((result, error)),
    )
    assert eventually(lambda: triton.service.num_active == 1)
    response = grpc_client.infer("tensorrt_llm", stop_request(), request_id="victim")
    assert list(response.get_response().outputs) == []
    result, error = ended.get(timeout=TIMEOUT_SECONDS)
    assert error is None
    assert result.as_numpy("text_output")[0].startswith(b"hi")
    assert eventually(lambda: backend.aborted == [1])


def test_stopping_an_unknown_request_is_fine(grpc_client):
    response = grpc_client.infer("tensorrt_llm", stop_request(), request_id="long gone")
    assert list(response.get_response().outputs) == []
