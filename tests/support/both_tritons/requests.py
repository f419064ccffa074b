"""Requests about capitals, to which the shipped model and its adapters have one completion."""

from types import ModuleType
from typing import Any

import numpy as np

from support.triton_requests import Array, i32, tensors, text_request

TEXT = "What is the capital of France?"
OTHER_TEXT = "What is the capital of Japan?"
PROMPT = np.array([[264, 19, 98, 51]], np.int32)


def text(module: ModuleType, content: str = TEXT, **more: Array) -> list[Any]:
    """Return the tensors of a request to the ensemble or the BLS model."""
    return text_request(module, content, 8, **more)


def texts(*values: str) -> Array:
    """Shape [1, len(values)]."""
    return np.array([values], dtype=object)


def tokens(module: ModuleType, prompt: Array = PROMPT, **more: Array) -> list[Any]:
    """Return the tensors of a request to tensorrt_llm."""
    lengths = {"input_lengths": i32(prompt.shape[1]), "request_output_len": i32(6)}
    return tensors(module, input_ids=prompt, **lengths, **more)


def task(number: int) -> Array:
    return np.array([[number]], np.uint64)
