"""A model of the vLLM backend: decoupled, with a stream and the generate routes."""

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import TEXT
from support.both_tritons.responses import GRPC, Response, infer, sent, stream
from support.both_tritons.servers import VLLM_MODEL, Address, Repository
from support.triton_requests import Array, tensors

_GREEDY = {"temperature": "0", "max_tokens": "8"}
_TRUE = np.array([True])
_ALL_OUTPUTS = {
    f"return_{name}": _TRUE
    for name in (
        *("finish_reason", "cumulative_logprob", "logprobs"),
        *("num_input_tokens", "num_output_tokens"),
    )
}


def _inputs(sampling: Any = _GREEDY, **more: Array) -> list[Any]:
    sampling = sampling if isinstance(sampling, str) else json.dumps(sampling)
    arrays = {
        "text_input": np.array([TEXT], dtype=object),
        "exclude_input_in_output": _TRUE,
        "sampling_parameters": np.array([sampling], dtype=object),
    }
    return tensors(GRPC, **(arrays | more))


_STREAMS: Mapping[str, tuple[list[Any], dict[str, Any]]] = {
    "whole": (_inputs(), {}),
    "streamed": (_inputs(stream=_TRUE), {}),
    "with the prompt": (_inputs(exclude_input_in_output=np.array([False])), {}),
    "streamed with the prompt": (
        _inputs(stream=_TRUE, exclude_input_in_output=np.array([False])),
        {},
    ),
    "an adapter": (_inputs(_GREEDY | {"lora_name": "chinese"}), {}),
    "an unknown adapter": (_inputs(_GREEDY | {"lora_name": "gone"}), {}),
    "an adapter as a parameter": (
        _inputs()[:2],
        {"parameters": {**_GREEDY, "lora_name": "chinese"}},
    ),
    "parameters": (_inputs()[:2], {"parameters": _GREEDY}),
    "an id": (_inputs(), {"request_id": "seven"}),
    "all outputs": (_inputs(_GREEDY | {"logprobs": 1}, **_ALL_OUTPUTS), {}),
    "all outputs, streamed": (
        _inputs(_GREEDY | {"logprobs": 1}, stream=_TRUE, **_ALL_OUTPUTS),
        {},
    ),
    "an unknown field": (_inputs(_GREEDY | {"nope": 1}), {}),
    "a field out of its range": (_inputs(_GREEDY | {"top_p": 7}), {}),
    "sampling parameters that are no JSON": (_inputs("{nope"), {}),
    "sampling parameters that are a list": (_inputs("[1]"), {}),
    "an empty prompt": (_inputs(text_input=np.array([""], dtype=object)), {}),
    "no prompt": (_inputs()[1:], {}),
    "a shape": (_inputs(text_input=np.array([[TEXT]], dtype=object)), {}),
}
_PARAMETERS: Mapping[str, Any] = _GREEDY | {"exclude_input_in_output": True}
_BODY: Mapping[str, Any] = {"text_input": TEXT, "parameters": _PARAMETERS}
_LONG = {**_PARAMETERS, "max_tokens": "600", "ignore_eos": "true"}
"""More than one response, however slow its reader is."""
_BODIES: Mapping[str, Any] = {
    "whole": _BODY,
    "stream": {**_BODY, "stream": True, "parameters": _LONG},
    "in parameters": {**_BODY, "parameters": _LONG | {"stream": True}},
    "an adapter": {**_BODY, "parameters": {**_PARAMETERS, "lora_name": "chinese"}},
    "an unknown adapter": {**_BODY, "parameters": {**_PARAMETERS, "lora_name": "gone"}},
    "sampling parameters": {**_BODY, "sampling_parameters": json.dumps(_GREEDY)},
    "no prompt": {"parameters": _GREEDY},
    "no JSON": b"{",
}


def _streamed(server: Address, inputs: list[Any], more: Mapping[str, Any]) -> Response:
    return stream(server, VLLM_MODEL, inputs, **more)


def _one(server: Address, wire: ModuleType) -> Response:
    prompt = tensors(wire, text_input=np.array([TEXT], dtype=object))
    return infer(server, wire, VLLM_MODEL, prompt)


CALLS = [
    *(
        Call(
            f"stream of vllm: {name}",
            Repository.VLLM,
            _streamed,
            (inputs, more),
        )
        for name, (inputs, more) in _STREAMS.items()
    ),
    *(
        Call(
            f"{action} of vllm: {name}",
            Repository.VLLM,
            sent,
            ("POST", f"/v2/models/{VLLM_MODEL}/{action}", body),
        )
        for action in ("generate", "generate_stream")
        for name, body in _BODIES.items()
    ),
    *on_both_wires("one response of vllm", Repository.VLLM, _one),
]
