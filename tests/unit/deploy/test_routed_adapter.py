import json
from typing import Any

import pytest

from loraplex.deploy.routing import MAX_NAME, routed_adapter, task_name

MODELS = ("base",)


@pytest.mark.parametrize(
    ("body", "adapter"),
    [
        ({"model": "base"}, ""),
        ({"model": "zh"}, "zh"),
        ({"model": "base:zh"}, "zh"),
        ({"model": "base", "lora_model": "zh"}, "zh"),
        ({"model": "base", "lora_path": ["zh", None]}, ""),
        ({"inputs": "x", "parameters": {"adapter_id": "zh"}}, "zh"),
        ({"text_input": "x", "lora_task_id": 3}, task_name(3)),
        ({"model": 3}, ""),
        ({"model": "x" * 1000}, "x" * MAX_NAME),
        ([1], ""),
    ],
)
def test_the_adapter_of_a_body(body: Any, adapter: str) -> None:
    assert routed_adapter((), json.dumps(body).encode(), MODELS) == adapter


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "\xff"}', b"\x00" * 100, b'{"a":' * 5000])
def test_a_body_that_is_no_json_names_none(body: bytes) -> None:
    assert routed_adapter((), body, MODELS) == ""


def test_a_header_names_the_adapter_of_any_body() -> None:
    headers = ((b"accept", b"*/*"), (b"x-lora-adapter", b"base:zh"))
    assert routed_adapter(headers, b'{"model": "ja"}', MODELS) == "zh"
