"""Clients for transport.py: one protocol, one number of requests at a time, for some seconds.

    python benchmarks/transport_client.py CELL ADDRESS CONCURRENCY SECONDS

Prints JSON: responses a second, and the median and 99th percentile of a request's milliseconds.
HTTP goes over raw sockets, one for each in-flight request; gRPC is grpc.aio over one channel, as
clients in Python have it; the cells of tritonclient are what its users get, on either. A streamed
request brings STREAM_LENGTH responses.
"""

import asyncio
import json
import re
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import msgspec
import numpy as np
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

STREAM_LENGTH = 32
WARM_UP_SECONDS = 0.5
_TEXT = b"hello world"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_UNARY, _STREAMED, _ENSEMBLE = "echo", "echo_stream", "ensemble"

SendRequest = Callable[[], Awaitable[int]]
"""One request; how many responses came."""


class Measured(msgspec.Struct, frozen=True):
    """Figures of one cell and one server."""

    responses_per_second: float
    num_responses: int
    """Number in the whole run, including the warm-up."""
    p50_ms: float
    p99_ms: float


def _element(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


# ---------------------------------------------------------------- HTTP


def _post(path: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def _binary_infer(model: str) -> bytes:
    """Body as tritonclient sends it: JSON, followed by the tensors' bytes."""
    data = [_element(_TEXT), struct.pack("<i", 1)]
    rows = [("text_input", "BYTES", data[0]), ("max_tokens", "INT32", data[1])]
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": [1, 1],
                    "parameters": {"binary_data_size": len(raw)},
                }
                for name, datatype, raw in rows
            ],
            "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
        }
    ).encode()
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    return _post(f"/v2/models/{model}/infer", header + b"".join(data), length)


def _generate_stream() -> bytes:
    body = {"text_input": _TEXT.decode(), "max_tokens": STREAM_LENGTH, "stream": True}
    return _post(f"/v2/models/{_STREAMED}/generate_stream", json.dumps(body).encode())


async def _http_unary(address: str, model: str) -> SendRequest:
    reader, writer = await _connected(address)
    request = _binary_infer(model)

    async def send() -> int:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(_CONTENT_LENGTH.search(head)[1])  # type: ignore[index]
        body = await reader.readexactly(length)
        assert _TEXT in body, body
        return 1

    return send


async def _http_stream(address: str) -> SendRequest:
    reader, writer = await _connected(address)
    request = _generate_stream()

    async def send() -> int:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        count = 0
        while (size := int(await reader.readline(), 16)) > 0:
            count += (await reader.readexactly(size + 2)).count(b"data: ")
        await reader.readline()
        assert count == STREAM_LENGTH, count
        return count

    return send


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.partition(":")
    return await asyncio.open_connection(host, int(port))


# ---------------------------------------------------------------- gRPC


def _message(model: str, count: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    rows = [("text_input", "BYTES", _element(_TEXT)), ("max_tokens", "INT32", _int32(count))]
    if count > 1:
        rows.append(("stream", "BOOL", b"\1"))
    for name, datatype, raw in rows:
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        message.raw_input_contents.append(raw)
    message.outputs.add(name="text_output")
    return message


def _int32(value: int) -> bytes:
    return struct.pack("<i", value)


def _grpc_unary(stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str) -> SendRequest:
    message = _message(model, 1)

    async def send() -> int:
        response = await stub.ModelInfer(message)
        assert _TEXT in response.raw_output_contents[0], response
        return 1

    return send


def _grpc_stream(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> SendRequest:
    """One stream for all requests of a client, as tritonclient keeps it."""
    message = _message(_STREAMED, STREAM_LENGTH)
    call = stub.ModelStreamInfer()

    async def send() -> int:
        await call.write(message)
        for _ in range(STREAM_LENGTH):
            response = await call.read()
            assert not response.error_message, response
        return STREAM_LENGTH

    return send


# ---------------------------------------------------------------- tritonclient


def _tritonclient(module: Any, address: str, concurrency: int) -> SendRequest:
    """HTTP keeps a connection for each in-flight request, gRPC one for all."""
    pool = {"conn_limit": concurrency} if module is triton_http else {}
    client = module.InferenceServerClient(address, **pool)
    inputs = [
        module.InferInput("text_input", [1, 1], "BYTES"),
        module.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([[_TEXT]], dtype=object))
    inputs[1].set_data_from_numpy(np.array([[1]], dtype=np.int32))
    outputs = [module.InferRequestedOutput("text_output")]

    async def send() -> int:
        response = await client.infer(_UNARY, inputs, outputs=outputs)
        assert _TEXT in response.as_numpy("text_output").item()
        return 1

    return send


# ---------------------------------------------------------------- measuring


async def _senders(cell: str, address: str, concurrency: int) -> list[SendRequest]:
    """One for each client."""
    if cell.endswith("tritonclient"):
        module = triton_http if cell.startswith("http") else triton_grpc
        return [_tritonclient(module, address, concurrency)] * concurrency
    model = _ENSEMBLE if cell.endswith("ensemble") else _UNARY
    if cell == "http stream":
        return [await _http_stream(address) for _ in range(concurrency)]
    if cell.startswith("http"):
        return [await _http_unary(address, model) for _ in range(concurrency)]
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.aio.insecure_channel(address))
    if cell == "grpc stream":
        return [_grpc_stream(stub) for _ in range(concurrency)]
    return [_grpc_unary(stub, model) for _ in range(concurrency)]


async def measure(cell: str, address: str, concurrency: int, seconds: float) -> Measured:
    senders = await _senders(cell, address, concurrency)
    start = time.perf_counter() + WARM_UP_SECONDS
    end = start + seconds
    taken: list[float] = []
    num_responses = num_all = 0

    async def client(send: SendRequest) -> None:
        nonlocal num_responses, num_all
        while (begun := time.perf_counter()) < end:
            count = await send()
            now = time.perf_counter()
            num_all += count
            if start <= begun and now < end:
                taken.append(now - begun)
                num_responses += count

    await asyncio.gather(*(client(send) for send in senders))
    taken.sort()
    return Measured(
        responses_per_second=num_responses / seconds,
        num_responses=num_all,
        p50_ms=1000 * taken[len(taken) // 2],
        p99_ms=1000 * taken[len(taken) * 99 // 100],
    )


def main() -> None:
    cell, address, concurrency, seconds = sys.argv[1:]
    measured = asyncio.run(measure(cell, address, int(concurrency), float(seconds)))
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main()
