"""The summary of a server that is ready."""

import types
from typing import Any, cast

import pytest

from loraplex.app.status_log import banner
from loraplex.core.config import ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.serving.access.tenant_adapters import LeftOut
from loraplex.serving.model_memory import (
    AcceleratorMemory,
    DeviceTier,
    HostTier,
    KVMemory,
    ModelMemory,
    RankFit,
)

GPU = AcceleratorMemory(total=80 << 30, free=1, other=1)


def text_of(
    *,
    accelerator: AcceleratorMemory | None = None,
    names: tuple[str, ...] = ("zh",),
    left_out: tuple[LeftOut, ...] = (),
    dialect: Any = "openai",
    **settings: Any,
) -> str:
    """The banner of one model that has these adapters."""
    memory = ModelMemory(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        weights_bytes=1,
        kv=KVMemory(num_bytes=1, block_tokens=16, blocks=1, tokens=16),
        device=DeviceTier(
            num_bytes=1, page_bytes=1, pages=1, fits=(RankFit(rank=8, pages=1, holds=1, more=1),)
        ),
        host=HostTier(num_bytes=1),
        accelerator=accelerator,
    )
    model = types.SimpleNamespace(
        card=types.SimpleNamespace(name="base", dtype="bfloat16"),
        config=ModelConfig(path="/m", **settings),
        memory=lambda: memory,
        adapter_names=lambda: [(name, "0") for name in names],
        left_out=left_out,
        chats=types.SimpleNamespace(text=""),
    )
    return banner([cast("Any", model)], ServerConfig(dialect=dialect), {"http": 1}, has_keys=False)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ({}, "no limit; --memory sets one"),
        ({"memory_bytes": 512 << 20}, "at most 512 MiB"),
        ({"accelerator": GPU}, "all 80 GiB of the device; --memory limits it"),
        ({"accelerator": GPU, "memory_bytes": 1 << 30}, "at most 1 GiB"),
    ],
)
def test_the_limit_of_memory(case: dict[str, Any], line: str) -> None:
    assert f"\n  memory    {line}\n" in text_of(**case)


def test_the_sizes_of_steps() -> None:
    assert "\n  steps     at most 4 sequences and 32 tokens\n" in text_of()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({}, '"model": "zh"'),
        ({"names": ()}, '"model": "base"'),
        (
            {"dialect": "llgtrt", "lora_root": "/a"},
            '"model": "base", "max_tokens": 32, "lora_model": "zh"',
        ),
        (
            {"dialect": "llgtrt", "lora_root": "/a", "names": ()},
            '"model": "base", "max_tokens": 32, "prompt"',
        ),
        ({"dialect": "llgtrt"}, '"model": "base", "max_tokens": 32, "prompt"'),
    ],
)
def test_the_request_to_copy_names_the_adapter_as_the_dialect_does(
    case: dict[str, Any], words: str
) -> None:
    assert words in text_of(**case)


def test_a_server_without_a_loaded_model() -> None:
    text = banner([], ServerConfig(), {"http": 1, "grpc": 2}, has_keys=False)
    assert "\n  model     none is loaded yet: clients load them" in text
    assert "try" not in text


@pytest.mark.parametrize(
    ("left_out", "text"),
    [
        ((), "1: zh; 1 more"),
        ((LeftOut("a", "", is_link=True),), "1: zh; left out: 1 symbolic link (see the warnings)"),
        (
            (LeftOut("a", "", is_link=True), LeftOut("b", "", is_link=True), LeftOut("c", "")),
            "1: zh; left out: 2 symbolic links, 1 other entry (see the warnings)",
        ),
        ((LeftOut("c", ""), LeftOut("d", "")), "1: zh; left out: 2 (see the warnings)"),
    ],
)
def test_what_folders_hold_and_is_not_served_is_counted(left_out, text):
    assert text in text_of(left_out=left_out)
