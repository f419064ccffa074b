"""`/generate` and `/generate_stream`: tensors out of the members of a JSON object, and back."""

from collections.abc import Mapping
from typing import Any

from support.both_tritons.answers import sent
from support.both_tritons.calls import Call
from support.both_tritons.requests import QUESTION
from support.both_tritons.servers import Repository

_ASKED = {"text_input": QUESTION, "max_tokens": 8}
_LONG = {"max_tokens": 600, "end_id": -1}
"""More than one response, however slow its reader is."""
_BODIES: Mapping[str, Any] = {
    "whole": _ASKED,
    "an id": _ASKED | {"id": "seven"},
    "parameters": _ASKED | {"parameters": {"top_k": 1, "nope": "a"}},
    "an unknown member": _ASKED | {"nope": "a"},
    "lists": {"text_input": [QUESTION], "max_tokens": [8]},
    "nested lists": {"text_input": [[QUESTION]], "max_tokens": [[8]]},
    "log probabilities": _ASKED | {"return_log_probs": True, "beam_width": 2},
    "an adapter": _ASKED | {"lora_task_id": 1},
    "an unknown adapter": _ASKED | {"lora_task_id": 99},
    "stop words": _ASKED | {"stop_words": ["ar"]},
    "FP16": _ASKED | {"lora_weights": [[0.5]]},
    "stream": _ASKED | _LONG | {"stream": True},
    "a text for a number": _ASKED | {"max_tokens": "many"},
    "a number for a text": {"text_input": 3, "max_tokens": 8},
    "a fraction for a number": _ASKED | {"max_tokens": 1.5},
    "parameters is a list": _ASKED | {"parameters": [1]},
    "an object for an input": _ASKED | {"max_tokens": {"a": 1}},
    "an object as a parameter": _ASKED | {"nope": {"a": 1}},
    "no text": {"max_tokens": 8},
    "null": _ASKED | {"top_k": None},
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


_GONE = {"unknown model": _ASKED}
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
