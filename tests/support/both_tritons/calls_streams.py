"""Calls to decoupled models: over a stream, and by the ways that they refuse."""

import queue
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import (
    OTHER_TEXT,
    TEXT,
    task,
    text,
    texts,
    tokens,
)
from support.both_tritons.responses import (
    GRPC,
    SECONDS,
    Response,
    client_of,
    infer,
    is_last,
    piece_of,
    pieces,
    stream,
)
from support.both_tritons.servers import Address, Repository
from support.triton_requests import TRUE, Array, i32, tensors, text_request

_TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
_TEXT_OPTIONS: Mapping[str, Mapping[str, Array]] = {
    "whole": {},
    "streamed": {"stream": TRUE},
    "an adapter": {"stream": TRUE, "lora_task_id": task(2)},
    "an unknown adapter": {"stream": TRUE, "lora_task_id": task(99)},
    "log probabilities": {"stream": TRUE, "return_log_probs": TRUE},
    "beams": {"beam_width": i32(2)},
    "a type": {"temperature": i32(1)},
    "stop words": {"stream": TRUE, "stop_words": texts("ar")},
}
_TWO = {
    "text_input": np.array([[TEXT], [OTHER_TEXT]], dtype=object),
    "max_tokens": np.array([[8], [8]], np.int32),
}
_ENDLESS = 1800
"""Number of tokens: the most that the model's length allows, which take some seconds."""


def _streamed(server: Address, model: str, arrays: Mapping[str, Array]) -> Response:
    make: Callable[..., list[Any]] = text
    return stream(server, model, make(GRPC, **arrays), request_id="seven")


def _tokens(server: Address, arrays: Mapping[str, Array]) -> Response:
    make: Callable[..., list[Any]] = tokens
    return stream(server, "tensorrt_llm", make(GRPC, **arrays))


def _one(server: Address, wire: ModuleType, model: str) -> Response:
    return infer(server, wire, model, text(wire))


def _batch(server: Address, model: str) -> Response:
    """Sort the responses: the elements of a batch may respond in any order."""
    responses = pieces(server, model, tensors(GRPC, **_TWO))
    fields = ("status", "outputs", "output text_output", "output batch_index")
    received = [str([response.get(field) for field in fields]) for response in responses]
    return {"status": "OK", "answers": sorted(received)}


def _without_empty_final(server: Address, model: str) -> Response:
    """Only responses with outputs come."""
    found: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer(model, text(GRPC, stream=TRUE))
        client.stop_stream()  # waits for the requests
    texts = [found.get_nowait().as_numpy("text_output")[0] for _ in range(found.qsize())]
    return {"status": "OK", "text": b"".join(texts)}


def _stopped(server: Address) -> Response:
    """Stop a request with another one: the last response to each is final."""
    responses: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        endless = _by_ids(_ENDLESS, streaming=TRUE, end_id=i32(-1))
        options = {"request_id": "victim", "enable_empty_final_response": True}
        client.async_stream_infer("tensorrt_llm", endless, **options)
        received = [piece_of(responses.get(timeout=SECONDS))]
        client.async_stream_infer("tensorrt_llm", _by_ids(0, stop=TRUE), **options)
        while sum(is_last(each) for each in received) < 2:
            received.append(piece_of(responses.get(timeout=SECONDS)))
        client.stop_stream()
    finals = sorted(
        (each["status"], bool(each.get("outputs"))) for each in received if is_last(each)
    )
    return {"status": "OK", "finals": finals, "came to its end": len(received) > _ENDLESS}


def _stop_alone(server: Address, request_id: str) -> Response:
    return stream(server, "tensorrt_llm", _by_ids(0, stop=TRUE), request_id=request_id)


def _by_ids(length: int, **more: Array) -> list[Any]:
    lengths = {"input_lengths": i32(1), "request_output_len": i32(length)}
    return tensors(GRPC, input_ids=i32(5), **lengths, **more)


def _cancelled(server: Address, model: str) -> Response:
    """Return what a client gets after it cancels."""
    responses: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        endless = text_request(GRPC, TEXT, _ENDLESS, stream=TRUE, end_id=i32(-1))
        client.async_stream_infer(model, endless)
        responses.get(timeout=SECONDS)
        client.stop_stream(cancel_requests=True)
    last = [responses.get_nowait() for _ in range(responses.qsize())][-1]
    return {"status": "OK", "last": str(last)}


def _calls() -> list[Call]:
    calls = []
    for model in _TEXT_MODELS:
        for option, arrays in _TEXT_OPTIONS.items():
            calls.append(
                Call(
                    f"stream of {model}: {option}",
                    Repository.DECOUPLED,
                    _streamed,
                    (model, arrays),
                )
            )
        for title, run in (
            ("a batch", _batch),
            ("without empty final responses", _without_empty_final),
            ("cancelled", _cancelled),
        ):
            calls.append(
                Call(
                    f"stream of {model}: {title}",
                    Repository.DECOUPLED,
                    run,
                    (model,),
                )
            )
        calls += on_both_wires(
            f"one response of the decoupled {model}",
            Repository.DECOUPLED,
            _one,
            model,
        )
    return calls


_TOKENS = [
    Call(
        f"stream of tensorrt_llm: {option}",
        Repository.DECOUPLED,
        _tokens,
        (arrays,),
    )
    for option, arrays in {
        "whole": {},
        "streamed": {"streaming": TRUE},
        "beams": {"beam_width": i32(2)},
    }.items()
]

CALLS = [
    *_calls(),
    *_TOKENS,
    Call("stream of tensorrt_llm: stopped", Repository.DECOUPLED, _stopped),
    Call(
        "stream of tensorrt_llm: a stop of no request",
        Repository.DECOUPLED,
        _stop_alone,
        ("nobody",),
    ),
    Call("stream of tensorrt_llm: a stop without id", Repository.DECOUPLED, _stop_alone, ("",)),
    Call(
        "stream of a model with one response",
        Repository.UNARY,
        _streamed,
        ("ensemble", {}),
    ),
    Call("stream of an unknown model", Repository.UNARY, _streamed, ("nope", {})),
]
