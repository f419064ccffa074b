"""LoRA of experts in requests of TensorRT-LLM's clients: the tokens of transformers.

The base is a Qwen2-MoE whose first layer is dense, so every module id of layers with experts is
used, and ids 5, 6 and 7 mean two things.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.modules import linear_path
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.tensor_file import RawTensor
from loraplex.compat.convert.adapters import write_lora_file, write_pair, write_peft
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.models.registry import read_config
from loraplex.testing.running_server import RunningServer, running
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.expert_adapters import RankOf, merged, random_expert_adapter
from support.families.case import FamilyCase
from support.families.experts import qwen2_moe
from support.triton_repositories import local_flags
from support.triton_requests import bf16_tensor, i32, tensors

pytestmark = pytest.mark.xdist_group("expert server")

NUM_EXPERTS, NUM_LAYERS, NUM_TOKENS = 4, 3, 10
PROMPT = (5, 17, 60, 3, 44, 9)
RANKS: dict[str, RankOf] = {
    "experts": lambda layer, module, expert: (
        module.startswith("experts.") * (expert != 1) * (1 + (layer + expert) % 3)
    ),
    "routers": lambda _, module, __: 2 * (module in ("router", "shared_expert_gate")),
    "shared": lambda _, module, __: 3 * module.startswith("shared_expert."),
    "all": lambda layer, module, expert: 1 + (layer + len(module) + expert) % 4,
}
IDS = {
    "experts": {13, 14, 15},
    "routers": {16, 17},
    "shared": {19, 20, 21},
    "all": {1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 16, 17, 19, 20, 21},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixture")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Return the base in transformers; the folder has the same."""
    tiny_tokenizers.FAMILIES["byte-level"](folder)
    vocab_size = -(-load_tokenizer(folder).vocab_size // 8) * 8
    case = FamilyCase(
        config=lambda: qwen2_moe(
            num_experts=NUM_EXPERTS, num_hidden_layers=NUM_LAYERS, vocab_size=vocab_size
        )
    )
    return case.save(folder)


@pytest.fixture(scope="module")
def adapters(folder: Path, model: Any) -> dict[str, HostAdapter]:
    spec = read_config(folder)
    return {
        name: random_expert_adapter(spec, name, rank_of, seed)
        for seed, (name, rank_of) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def server(folder: Path, model: Any, tmp_path_factory: Any) -> Iterator[RunningServer]:
    flags = local_flags(tmp_path_factory.mktemp("state"))
    command = [sys.executable, "-m", "loraplex", "serve", str(folder)]
    with running([*command, *flags]) as started:
        yield started


@pytest.fixture(params=["grpc", "http"])
def wire(request: Any, server: RunningServer) -> Iterator[tuple[Any, Any]]:
    module, port = {
        "grpc": (triton_grpc, server.grpc_port),
        "http": (triton_http, server.http_port),
    }[request.param]
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield module, client


def rows_of(adapter: HostAdapter) -> list[CanonicalRow]:
    return [
        CanonicalRow(
            weight.target.layer,
            weight.target.module,
            expert := weight.target.expert if weight.target.module.startswith("experts.") else None,
            RowKind.LORA,
            float(np.float32(weight.scale)),
            {"a": raw(weight.a), "b": raw(weight.b)},
            linear_path(weight.target.layer, weight.target.module).format(expert=expert),
        )
        for weight in adapter.weights
    ]


def raw(values: torch.Tensor) -> RawTensor:
    return RawTensor("F32", tuple(values.shape), values.numpy().tobytes())


def pair(adapter: HostAdapter, storage: StorageType = StorageType.FLOAT32) -> Any:
    """Return (lora_weights, lora_config) as NumPy's arrays; bfloat16 as its bits."""
    weights, config = lora_tensors(rows_of(adapter), storage, NUM_EXPERTS)
    kind = "<u2" if storage is StorageType.BFLOAT16 else "<f4"
    return (
        np.ndarray(weights.shape, kind, weights.data),
        np.ndarray(config.shape, "<i4", config.data),
    )


def generate(wire: tuple[Any, Any], *more: Any) -> list[int]:
    module, client = wire
    inputs = tensors(
        module,
        input_ids=i32(*PROMPT),
        input_lengths=i32(len(PROMPT)),
        request_output_len=i32(NUM_TOKENS),
        runtime_top_k=i32(1),
    )
    result = client.infer("tensorrt_llm", [*inputs, *more])
    token_ids: list[int] = result.as_numpy("output_ids")[0, 0].tolist()
    return token_ids[len(PROMPT) :][:NUM_TOKENS]


def lora(wire: tuple[Any, Any], weights: Any, config: Any) -> list[Any]:
    module, _ = wire
    if weights.dtype == np.uint16:
        of_weights = [bf16_tensor(module, "lora_weights", weights)]
    else:
        of_weights = tensors(module, lora_weights=weights)
    return [*of_weights, *tensors(module, lora_config=config)]


def by_task(wire: tuple[Any, Any], task_id: int) -> list[Any]:
    return tensors(wire[0], lora_task_id=np.array([[task_id]], dtype=np.uint64))


def expected(model: Any, *adapters: HostAdapter) -> list[int]:
    """Return the tokens of transformers with the adapters in its weights."""
    with merged(model, [(adapter, 1.0) for adapter in adapters]), torch.no_grad():
        token_ids = list(PROMPT)
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([token_ids])).logits
            token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(PROMPT) :]


@pytest.mark.parametrize("name", RANKS)
def test_every_id_in_a_request(wire, model, adapters, name):
    weights, config = pair(adapters[name])
    assert set(config[0, :, 0].tolist()) == IDS[name]
    tokens = expected(model, adapters[name])
    assert tokens != expected(model)
    task = by_task(wire, 100 + list(RANKS).index(name))
    assert generate(wire, *lora(wire, weights, config), *task) == tokens
    assert generate(wire, *task) == tokens
    assert generate(wire) == expected(model)


def test_older_ids_of_the_shared_expert(wire, model, adapters):
    weights, config = pair(adapters["shared"])
    older = config.copy()
    for new, old in ((19, 5), (20, 6), (21, 7)):
        older[..., 0][config[..., 0] == new] = old
    assert generate(wire, *lora(wire, weights, older)) == expected(model, adapters["shared"])


def test_bfloat16_is_what_the_file_holds(wire, server, adapters, tmp_path):
    write_pair(rows_of(adapters["all"]), tmp_path / "half", StorageType.BFLOAT16)
    register(server, "half", tmp_path / "half", 150)
    inline = lora(wire, *pair(adapters["all"], StorageType.BFLOAT16))
    assert generate(wire, *inline) == generate(wire, *by_task(wire, 150))


@pytest.mark.parametrize("kind", ["pair", "llgtrt", "peft"])
def test_files(wire, server, model, adapters, tmp_path, kind):
    rows, path = rows_of(adapters["all"]), tmp_path / "written.safetensors"
    match kind:
        case "pair":
            write_pair(rows, path := tmp_path / "pair", StorageType.FLOAT32)
        case "llgtrt":
            write_lora_file(rows, path)
        case "peft":
            write_peft(rows, path := tmp_path / "peft")
    task_id = {"pair": 201, "llgtrt": 202, "peft": 203}[kind]
    register(server, kind, path, task_id)
    assert generate(wire, *by_task(wire, task_id)) == expected(model, adapters["all"])


def register(server: RunningServer, name: str, path: Path, task_id: int) -> None:
    body = {"name": name, "path": str(path), "task_id": task_id, "replace": True}
    status, reported = server.post("/v1/adapters", body)
    assert status in (200, 201), reported


def test_one_expert_s_values_are_refused(wire, adapters):
    weights, config = pair(adapters["experts"])
    rank = int(config[0, 0, 2])
    cut = np.zeros_like(weights[:, :1])
    cut[..., : rank * (32 + 24)] = weights[:, :1, : rank * (32 + 24)]
    with pytest.raises(InferenceServerException, match="those of one expert") as raised:
        generate(wire, *lora(wire, cut, config[:, :1]))
    # TensorRT-LLM's text.
    assert "lora_weights has to few values for moe_h_to_4h" in raised.value.message()
    assert "layer 1" in raised.value.message()
