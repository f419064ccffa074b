"""Decoupled models: over a stream, and what is said of other ways to ask them."""

import queue
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from loraplex.testing.both_tritons.answers import (
    GRPC,
    SECONDS,
    Answer,
    client_of,
    infer,
    pieces,
    stream,
)
from loraplex.testing.both_tritons.calls import Call, on_both_wires
from loraplex.testing.both_tritons.requests import (
    OTHER_QUESTION,
    QUESTION,
    task,
    text,
    texts,
    tokens,
)
from loraplex.testing.both_tritons.servers import Address, Repository
from loraplex.testing.triton_requests import TRUE, Array, i32, tensors, text_request

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


def _stopped(server: Address, model: str) -> Answer:
    """A request that another ends: its last answer is final, the stop's is empty."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        endless = text_request(GRPC, QUESTION, _ENDLESS, stream=TRUE, end_id=i32(-1))
        client.async_stream_infer(
            model, endless, request_id="victim", enable_empty_final_response=True
        )
        answers.get(timeout=SECONDS)
        stop = text_request(GRPC, "", 1, stop=TRUE)
        client.async_stream_infer(
            model, stop, request_id="victim", enable_empty_final_response=True
        )
        finals: list[bool] = []
        while len(finals) < 2:
            piece = answers.get(timeout=SECONDS)
            response = piece.get_response()
            if response.parameters["triton_final_response"].bool_param:
                finals.append(len(response.outputs) > 0)
        client.stop_stream()
    return {"status": "OK", "finals": len(finals)}


def _stop_alone(server: Address, model: str, request_id: str) -> Answer:
    stop = text_request(GRPC, "", 1, stop=TRUE)
    return stream(server, model, stop, request_id=request_id)


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
            ("stopped", _stopped),
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
        for title, request_id in (("nobody", "nobody"), ("no id", "")):
            calls.append(
                Call(
                    f"stream of {model}: a stop of {title}",
                    Repository.DECOUPLED,
                    _stop_alone,
                    (model, request_id),
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
    Call(
        "stream of a model with one answer",
        Repository.UNARY,
        _streamed,
        ("ensemble", {}),
    ),
    Call("stream of an unknown model", Repository.UNARY, _streamed, ("nope", {})),
]
