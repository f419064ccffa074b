"""The five models and their options."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import (
    OTHER_TEXT,
    PROMPT,
    TEXT,
    text,
    texts,
    tokens,
)
from support.both_tritons.responses import Response, infer
from support.both_tritons.servers import Address, Repository
from support.triton_requests import TRUE, Array, f32, i32, tensors

_LOG_PROBS = {"return_log_probs": TRUE}
_TEXT_OPTIONS: Mapping[str, Mapping[str, Array]] = {
    "whole": {},
    "without the prompt": {"exclude_input_in_output": TRUE},
    "log probabilities": _LOG_PROBS,
    "stop words": {"stop_words": texts("is", "ar")},
    "bad words": {"bad_words": texts("Paris")},
    "an end id": {"end_id": i32(3)},
    "no end id": {"end_id": i32(-1)},
    "at least so many tokens": {"min_tokens": i32(6)},
    "its older name": {"min_length": i32(6)},
    "sampled with a seed": {
        "temperature": f32(1.5),
        "top_k": i32(20),
        "top_p": f32(0.95),
        "seed": np.array([[7]], np.uint64),
    },
    "penalties": {
        "repetition_penalty": f32(1.3),
        "presence_penalty": f32(0.5),
        "frequency_penalty": f32(0.5),
    },
    "beams": {"beam_width": i32(2), **_LOG_PROBS},
    "two sequences": {"num_return_sequences": i32(2), "beam_width": i32(2)},
    "biased": {"embedding_bias_words": texts("P"), "embedding_bias_weights": f32(-100.0)},
    "guided": {
        "guided_decoding_guide_type": texts("regex"),
        "guided_decoding_guide": texts("[a-f]{3}"),
        "exclude_input_in_output": TRUE,
    },
    "logits": {"return_generation_logits": TRUE},
}
_TOKEN_OPTIONS: Mapping[str, Mapping[str, Array]] = {
    "whole": {},
    "an end id": {"end_id": i32(3)},
    "log probabilities": {"return_log_probs": TRUE},
    "beams": {"beam_width": i32(2)},
    "without the prompt": {"exclude_input_in_output": TRUE},
    "sampled with a seed": {
        "temperature": f32(1.5),
        "runtime_top_k": i32(20),
        "runtime_top_p": f32(0.9),
        "seed": np.array([[7]], np.uint64),
    },
    "its older name of a seed": {
        "temperature": f32(1.5),
        "random_seed": np.array([[7]], np.uint64),
    },
    "bad words": {"bad_words_list": np.array([[[5, 6], [1, 2]]], np.int32)},
}


def _infer(
    server: Address,
    wire: ModuleType,
    model: str,
    make: Callable[..., list[Any]],
    arrays: Mapping[str, Array],
) -> Response:
    return infer(server, wire, model, make(wire, **arrays))


def _calls(
    model: str, make: Callable[..., list[Any]], options: Mapping[str, Mapping[str, Array]]
) -> list[Call]:
    """make: of a wire and tensors."""
    return [
        call
        for option, arrays in options.items()
        for call in on_both_wires(
            f"{model}: {option}", Repository.UNARY, _infer, model, make, arrays
        )
    ]


_QUERY = {"QUERY": texts(TEXT), "REQUEST_OUTPUT_LEN": i32(8)}
_PREPROCESSING = {
    "whole": _QUERY,
    "words": _QUERY
    | {
        "STOP_WORDS_DICT": texts("Paris", "Rome"),
        "BAD_WORDS_DICT": texts("London"),
        "END_ID": i32(9),
        "PAD_ID": i32(8),
        "EMBEDDING_BIAS_WORDS": texts("P"),
        "EMBEDDING_BIAS_WEIGHTS": f32(2.0),
    },
    "a batch": {
        "QUERY": np.array([[TEXT], ["?"]], dtype=object),
        "REQUEST_OUTPUT_LEN": np.array([[8], [5]], np.int32),
    },
}
_TOKENS = {"TOKENS_BATCH": PROMPT[None], "SEQUENCE_LENGTH": i32(PROMPT.shape[1])}
_POSTPROCESSING = {
    "whole": _TOKENS,
    "passed through": _TOKENS
    | {"CUM_LOG_PROBS": f32(-1.5), "OUTPUT_LOG_PROBS": np.ones((1, 1, 4), np.float32)},
    "a batch": {
        "TOKENS_BATCH": np.stack([PROMPT, PROMPT[:, ::-1]]),
        "SEQUENCE_LENGTH": np.array([[4], [2]], np.int32),
    },
}
_BATCH = {
    "text_input": np.array([[TEXT], [OTHER_TEXT]], dtype=object),
    "max_tokens": np.array([[8], [8]], np.int32),
}

CALLS = [
    *_calls("ensemble", text, _TEXT_OPTIONS),
    *_calls("tensorrt_llm_bls", text, _TEXT_OPTIONS),
    *_calls("tensorrt_llm", tokens, _TOKEN_OPTIONS),
    *_calls("preprocessing", tensors, _PREPROCESSING),
    *_calls("postprocessing", tensors, _POSTPROCESSING),
    *_calls("ensemble", tensors, {"a batch": _BATCH}),
    *_calls("tensorrt_llm_bls", tensors, {"a batch": _BATCH}),
]
