"""Decoupled models: over a stream, and what is said of other ways to ask them."""

import queue
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from support.both_tritons.answers import (
    GRPC,
    SECONDS,
    Answer,
    client_of,
    infer,
    is_last,
    piece_of,
    pieces,
    stream,
)
from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import (
    OTHER_QUESTION,
    QUESTION,
    task,
    text,
    texts,
    tokens,
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
    "text_input": np.array([[QUESTION], [OTHER_QUESTION]], dtype=object),
    "max_tokens": np.array([[8], [8]], np.int32),
}
_ENDLESS = 1800
"""Tokens: as many as the model's length lets run, some seconds."""


def _streamed(server: Address, model: str, arrays: Mapping[str, Array]) -> Answer:
    make: Callable[..., list[Any]] = text
    return stream(server, model, make(GRPC, **arrays), request_id="seven")


def _tokens(server: Address, arrays: Mapping[str, Array]) -> Answer:
    make: Callable[..., list[Any]] = tokens
    return stream(server, "tensorrt_llm", make(GRPC, **arrays))


def _one(server: Address, wire: ModuleType, model: str) -> Answer:
    return infer(server, wire, model, text(wire))


def _batch(server: Address, model: str) -> Answer:
    """The elements of a batch answer in any order."""
    answers = pieces(server, model, tensors(GRPC, **_TWO))
    fields = ("status", "outputs", "output text_output", "output batch_index")
    told = [str([answer.get(field) for field in fields]) for answer in answers]
    return {"status": "OK", "answers": sorted(told)}


def _without_empty_final(server: Address, model: str) -> Answer:
    """Only responses with outputs come."""
    found: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer(model, text(GRPC, stream=TRUE))
        client.stop_stream()  # waits for what was asked
    texts = [found.get_nowait().as_numpy("text_output")[0] for _ in range(found.qsize())]
    return {"status": "OK", "text": b"".join(texts)}


def _stopped(server: Address) -> Answer:
    """A request that another ends: its last answer is final, and so is the stop's."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        endless = _by_ids(_ENDLESS, streaming=TRUE, end_id=i32(-1))
        options = {"request_id": "victim", "enable_empty_final_response": True}
        client.async_stream_infer("tensorrt_llm", endless, **options)
        told = [piece_of(answers.get(timeout=SECONDS))]
        client.async_stream_infer("tensorrt_llm", _by_ids(0, stop=TRUE), **options)
        while sum(is_last(each) for each in told) < 2:
            told.append(piece_of(answers.get(timeout=SECONDS)))
        client.stop_stream()
    finals = sorted((each["status"], bool(each.get("outputs"))) for each in told if is_last(each))
    return {"status": "OK", "finals": finals, "came to its end": len(told) > _ENDLESS}


def _stop_alone(server: Address, request_id: str) -> Answer:
    return stream(server, "tensorrt_llm", _by_ids(0, stop=TRUE), request_id=request_id)


def _by_ids(length: int, **more: Array) -> list[Any]:
    lengths = {"input_lengths": i32(1), "request_output_len": i32(length)}
    return tensors(GRPC, input_ids=i32(5), **lengths, **more)


def _cancelled(server: Address, model: str) -> Answer:
    """What a client that cancels is told."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        endless = text_request(GRPC, QUESTION, _ENDLESS, stream=TRUE, end_id=i32(-1))
        client.async_stream_infer(model, endless)
        answers.get(timeout=SECONDS)
        client.stop_stream(cancel_requests=True)
    last = [answers.get_nowait() for _ in range(answers.qsize())][-1]
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
            f"one answer of the decoupled {model}",
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
        "stream of tensorrt_llm: a stop of nobody", Repository.DECOUPLED, _stop_alone, ("nobody",)
    ),
    Call("stream of tensorrt_llm: a stop without id", Repository.DECOUPLED, _stop_alone, ("",)),
    Call(
        "stream of a model with one answer",
        Repository.UNARY,
        _streamed,
        ("ensemble", {}),
    ),
    Call("stream of an unknown model", Repository.UNARY, _streamed, ("nope", {})),
]
