"""`/generate` and `/generate_stream`: tensors out of the members of a JSON object, and back."""

from collections.abc import Mapping
from typing import Any

from support.both_tritons.calls import Call
from support.both_tritons.requests import TEXT
from support.both_tritons.responses import sent
from support.both_tritons.servers import Repository

_BODY = {"text_input": TEXT, "max_tokens": 8}
_LONG = {"max_tokens": 600, "end_id": -1}
"""More than one response, however slow its reader is."""
_BODIES: Mapping[str, Any] = {
    "whole": _BODY,
    "an id": _BODY | {"id": "seven"},
    "parameters": _BODY | {"parameters": {"top_k": 1, "nope": "a"}},
    "an unknown member": _BODY | {"nope": "a"},
    "lists": {"text_input": [TEXT], "max_tokens": [8]},
    "nested lists": {"text_input": [[TEXT]], "max_tokens": [[8]]},
    "log probabilities": _BODY | {"return_log_probs": True, "beam_width": 2},
    "an adapter": _BODY | {"lora_task_id": 1},
    "an unknown adapter": _BODY | {"lora_task_id": 99},
    "stop words": _BODY | {"stop_words": ["ar"]},
    "FP16": _BODY | {"lora_weights": [[0.5]]},
    "stream": _BODY | _LONG | {"stream": True},
    "a text for a number": _BODY | {"max_tokens": "many"},
    "a number for a text": {"text_input": 3, "max_tokens": 8},
    "a fraction for a number": _BODY | {"max_tokens": 1.5},
    "parameters is a list": _BODY | {"parameters": [1]},
    "an object for an input": _BODY | {"max_tokens": {"a": 1}},
    "an object as a parameter": _BODY | {"nope": {"a": 1}},
    "no text": {"max_tokens": 8},
    "null": _BODY | {"top_k": None},
    "no JSON": b"{",
    "an empty body": b"",
    "a list": b"[1]",
}


def _of(repository: Repository, model: str, action: str, names: Mapping[str, Any]) -> list[Call]:
    return [
        Call(
            f"{action} of the {repository} {model}: {name}",
            repository,
            sent,
            ("POST", f"/v2/models/{model}/{action}", body),
        )
        for name, body in names.items()
    ]


_GONE = {"unknown model": _BODY}
_FEW = {name: _BODIES[name] for name in ("whole", "stream", "an unknown adapter", "no JSON")}

CALLS = [
    *_of(Repository.UNARY, "ensemble", "generate", _BODIES),
    *_of(Repository.DECOUPLED, "ensemble", "generate", _FEW),
    *_of(Repository.DECOUPLED, "tensorrt_llm_bls", "generate", _FEW),
    *_of(Repository.UNARY, "ensemble", "generate_stream", _BODIES),
    *_of(Repository.DECOUPLED, "ensemble", "generate_stream", _BODIES),
    *_of(Repository.DECOUPLED, "tensorrt_llm_bls", "generate_stream", _FEW),
    *_of(Repository.UNARY, "nope", "generate", _GONE),
    *_of(Repository.UNARY, "nope", "generate_stream", _GONE),
    *_of(Repository.UNARY, "ensemble/versions/9", "generate", _GONE),
]
