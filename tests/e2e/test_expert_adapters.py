"""A served model with experts, and an adapter of PEFT on some of them, through its whole life."""

import concurrent.futures
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraplex.testing.running_server import RunningServer, running
from support import tiny_tokenizers
from support.engine_kills import engine_pid
from support.eventually import eventually
from support.tiny_model import TinyCheckpoint
from support.triton_repositories import local_flags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

HIDDEN, INNER, NUM_LAYERS, NUM_EXPERTS = 32, 24, 2, 6
RANK = 4
ADAPTED_EXPERTS = (0, 2, 5)
PROMPT = list(range(3, 20))
SHORT, LONG = 16, 900
"""Tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    folder.mkdir()
    tiny_tokenizers.FAMILIES["byte-level"](folder)
    checkpoint = TinyCheckpoint(
        folder,
        architectures=["MixtralForCausalLM"],
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    for name, tensor in checkpoint.tensors.items():
        # Small enough that attention sees more than one token.
        checkpoint.tensors[name] = 0.2 * tensor
    command = [sys.executable, "-m", "loraplex", "serve", str(checkpoint.save())]
    state_dir = tmp_path_factory.mktemp("state")
    with running([*command, "--engine-wait-seconds", "170", *local_flags(state_dir)]) as server:
        yield server


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write LoRA of the router and of some experts, whose names are those of PEFT."""
    folder = tmp_path_factory.mktemp("adapter")
    shapes = {"w1": (HIDDEN, INNER), "w2": (INNER, HIDDEN), "w3": (HIDDEN, INNER)}
    modules = {
        f"experts.{expert}.{name}": shape
        for expert in ADAPTED_EXPERTS
        for name, shape in shapes.items()
    } | {"gate": (HIDDEN, NUM_EXPERTS)}
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for module, (num_in, num_out) in modules.items():
            path = f"base_model.model.model.layers.{layer}.block_sparse_moe.{module}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": list(modules)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def complete(server: RunningServer, model: str, max_tokens: int = SHORT) -> tuple[int, Any]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    return server.post("/v1/completions", body)


def choices_of(server: RunningServer, model: str, max_tokens: int = SHORT) -> Any:
    status, body = complete(server, model, max_tokens)
    assert status == 200, body
    return body["choices"]


def memory(server: RunningServer) -> Any:
    status, text = server.get("/v1/memory")
    assert status == 200
    return json.loads(text)["mixtral"]


def test_expert_adapter_from_load_to_unload(server: RunningServer, adapter: Path) -> None:
    """Its report, its tokens, its memory, and the same tokens although the engine is killed."""
    status, report = server.post("/v1/adapters", {"name": "some", "path": str(adapter)})
    assert status in (200, 201), report
    assert report["content"]["ranks"] == {
        "experts.down_proj": [RANK, RANK],
        "experts.gate_proj": [RANK, RANK],
        "experts.up_proj": [RANK, RANK],
        "router": [RANK, RANK],
    }
    base, adapted = choices_of(server, "mixtral"), choices_of(server, "some")
    assert base != adapted
    assert memory(server)["device"]["adapters"] == 1
    expected = [choices_of(server, model, LONG) for model in ("mixtral", "some")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(choices_of, server, model, LONG) for model in ("mixtral", "some")]
        assert eventually(lambda: memory(server)["kv"]["held"] > 0)
        first = engine_pid(server)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert [job.result() for job in jobs] == expected
    assert engine_pid(server) != first
    assert server.delete("/v1/adapters/some") == 200
    status, body = complete(server, "some")
    assert status == 404, body
    assert eventually(lambda: memory(server)["device"]["pages_used"] == 0)
    assert choices_of(server, "mixtral") == base
