"""LoRA adapters as GGUF files: the rows of the PEFT adapter they were made of; what is refused."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.canonical import CanonicalRow, read_canonical
from loraplex.adapters.examination import examine
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)
from support.gguf_files import gguf_bytes, gguf_of_lora
from support.naming import naming

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 8, 64, 96, 40
SHAPES = BaseShapes(
    2,
    {
        "q_proj": (HIDDEN, HEADS * HEAD_DIM),
        "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
        "down_proj": (INNER, HIDDEN),
    },
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    architecture="MistralForCausalLM",
    head_dim=HEAD_DIM,
)
RANK = 4
Stage = Callable[..., StagedAdapter]


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """A PEFT folder; the config.json of its base is in the folder above."""
    folder = tmp_path / "peft"
    folder.mkdir()
    config = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    targets = ["q_proj", "k_proj", "down_proj", "embed_tokens"]
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    rng = np.random.default_rng(5)
    tensors = {}
    for layer in range(SHAPES.num_layers):
        for module, (num_in, num_out) in SHAPES.modules.items():
            parent = "mlp" if module == "down_proj" else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, num_in)).astype("f4")
            tensors[f"{name}.lora_B.weight"] = rng.normal(size=(num_out, RANK)).astype("f4")
    name = "base_model.model.model.embed_tokens.lora_embedding"
    tensors[f"{name}_A"] = rng.normal(size=(RANK, VOCAB)).astype("f4")
    tensors[f"{name}_B"] = rng.normal(size=(HIDDEN, RANK)).astype("f4")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def write(tmp_path: Path, peft: Path) -> Callable[..., Path]:
    """A function (kind, **metadata) -> path of the PEFT adapter as a GGUF file."""

    def run(kind: str = "F32", **changes: Any) -> Path:
        path = tmp_path / "lora.gguf"
        path.write_bytes(gguf_of_lora(peft, tmp_path, kind, **changes))
        return path

    return run


@pytest.fixture
def shapes() -> BaseShapes:
    return SHAPES


def rows_of(staged: StagedAdapter) -> dict[tuple[int | None, str], CanonicalRow]:
    rows = read_canonical(Path(staged.source.path)).rows
    return {(row.layer, row.module): row for row in rows}


def test_float32_is_the_very_same_adapter(
    staged: Stage, peft: Path, write: Callable[..., Path]
) -> None:
    wanted, found = staged(peft), staged(write())
    assert found.source.digest == wanted.source.digest
    (warning,) = found.warnings
    assert "use_rslora or alpha_pattern" in warning
    assert "multiplied by 1.5 (alpha / rank)" in warning


@pytest.mark.parametrize("alpha", [3e38, 1e30])
def test_a_scale_that_overflows_is_refused(
    alpha: float, staged: Stage, write: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidAdapterError, match=naming(1, "bfloat16", "model.embed_tokens")):
        staged(write(adapter__lora__alpha=alpha), pool_dtype="bfloat16")


@pytest.mark.parametrize(("kind", "most"), [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2)])
def test_other_types(
    kind: str, most: float, staged: Stage, peft: Path, write: Callable[..., Path]
) -> None:
    wanted, found = rows_of(staged(peft)), rows_of(staged(write(kind)))
    assert found.keys() == wanted.keys()
    dtypes = set()
    for place, row in wanted.items():
        for name, tensor in row.tensors.items():
            dtypes.add(found[place].tensors[name].dtype)
            np.testing.assert_allclose(
                found[place].tensors[name].array(), tensor.array(), rtol=most, atol=most
            )
    # Rows of B have no whole blocks; those of A have, and are widened exactly.
    assert dtypes == ({"F32", "F16"} if kind == "Q8_0" else {kind})


def test_q8_0_is_decoded_exactly(staged: Stage, write: Callable[..., Path]) -> None:
    path = write()
    codes = np.arange(-64, 64).reshape(4, 32).astype("i1")
    blocks = np.zeros((4, 2, 34), "u1")
    blocks[..., :2] = np.array([0.5, 0.25], "<f2").view("u1").reshape(2, 2)
    blocks[:, 0, 2:] = blocks[:, 1, 2:] = codes.view("u1")
    b = np.ones((HIDDEN, 4), "<f4")
    name = "blk.0.ffn_down.weight.lora_"
    shapes = BaseShapes(
        1, {"down_proj": (64, 64)}, architecture="LlamaForCausalLM", head_dim=HEAD_DIM
    )
    path.write_bytes(
        gguf_bytes(
            FIELDS,
            {
                f"{name}a": ("Q8_0", (4, 64), blocks.tobytes()),
                f"{name}b": ("F32", (64, 4), b.tobytes()),
            },
        )
    )
    (row,) = rows_of(staged(path, shapes=shapes)).values()
    wanted = np.concatenate((codes * np.float32(0.5), codes * np.float32(0.25)), axis=1)
    np.testing.assert_array_equal(row.tensors["a"].array(), wanted)


def test_without_alpha_the_factor_is_one(staged: Stage, write: Callable[..., Path]) -> None:
    for alpha in (0.0, None):
        rows = rows_of(staged(write(adapter__lora__alpha=alpha)))
        assert {row.scale for row in rows.values()} == {1.0}


def test_rows_that_are_not_permuted_are_of_another_adapter(
    staged: Stage, peft: Path, write: Callable[..., Path]
) -> None:
    wanted, found = rows_of(staged(peft)), rows_of(staged(write(permutes=False)))
    for place, row in wanted.items():
        is_same = row.tensors["b"].data == found[place].tensors["b"].data
        assert is_same == (place[1] not in ("q_proj", "k_proj"))


def test_a_folder_with_one_file(staged: Stage, tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "My-LoRA-f32.gguf").write_bytes(path.read_bytes())
    assert staged(folder).source.digest == staged(path).source.digest
    (folder / "second.gguf").write_bytes(path.read_bytes())
    with pytest.raises(InvalidAdapterError, match=naming(".gguf", "My-LoRA")):
        staged(folder)


def test_unchanged_files_are_known(staged: Stage, write: Callable[..., Path]) -> None:
    path = write()
    assert not staged(path).was_known
    again = staged(path)
    assert again.was_known
    assert len(again.warnings) == 1


def test_the_base_that_it_names(staged: Stage, write: Callable[..., Path]) -> None:
    hub = {"general__base_model__0__repo_url": "https://huggingface.co/meta/Llama-3-8B"}
    named = {"general__base_model__0__name": "Llama 3 8B"}
    for fields in (hub, named):
        assert len(staged(write(**fields), base_model="llama-3-8b").warnings) == 1
        loaded = staged(write(**fields), base_model="qwen", base_check=BaseCheck.WARN)
        warning, _ = loaded.warnings
        assert "Llama-3-8B" in warning
        with pytest.raises(AdapterMismatchError, match="Llama-3-8B"):
            staged(write(**fields), base_model="qwen")


def test_every_tensor_is_accounted_for(tmp_path: Path, write: Callable[..., Path]) -> None:
    request = StageRequest(
        request_id=1, path=str(write("F16")), state_dir=str(tmp_path / "state"), shapes=SHAPES
    )
    found = examine(request)
    assert (found.format, found.num_tensors, found.num_refused) == ("GGUF", 14, 0)
    first = next(one for one in found.tensors if one.name == "blk.1.attn_k.weight.lora_b")
    assert (first.module, first.layer, first.rank, first.dtype) == ("k_proj", 1, RANK, "F16")
    narrow = BaseShapes(1, SHAPES.modules, architecture="LlamaForCausalLM", head_dim=HEAD_DIM)
    request = StageRequest(
        request_id=1, path=request.path, state_dir=request.state_dir, shapes=narrow
    )
    refused = examine(request)
    assert refused.num_refused == 8  # of the second layer, and of the embedding
    assert all("layer 1" in one.reason for one in refused.tensors if one.layer == 1 if one.reason)


FIELDS = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}
A = ("F32", (2, HIDDEN), bytes(8 * HIDDEN))
B = ("F32", (32, 2), bytes(8 * 32))
Q = "blk.0.attn_q.weight.lora_"
WHOLE = gguf_bytes(FIELDS, {f"{Q}a": A, f"{Q}b": B})
NAN = struct.pack("<f", float("nan")) * 64


def with_fields(**changes: Any) -> bytes:
    fields = FIELDS | {name.replace("__", "."): value for name, value in changes.items()}
    return gguf_bytes(fields, {f"{Q}a": A, f"{Q}b": B})


def with_tensors(**tensors: tuple[str, tuple[int, ...], bytes]) -> bytes:
    return gguf_bytes(FIELDS, {name.replace("__", "."): value for name, value in tensors.items()})


REFUSED: dict[str, tuple[bytes, type[LoraplexError], str]] = {
    "another file": (b"GGML" + WHOLE[4:], InvalidAdapterError, "is no GGUF file"),
    "a part": (
        with_fields(split__count=2),
        UnsupportedFeatureError,
        "is one of 2 parts of a split adapter",
    ),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\n",
        InvalidAdapterError,
        "git lfs pull",
    ),
    "absurd tensors": (
        WHOLE[:8] + struct.pack("<Q", 1 << 60) + WHOLE[16:],
        InvalidAdapterError,
        "bytes cannot",
    ),
    "cut off": (WHOLE[:-64], InvalidAdapterError, "cut off: it ends within tensor blk.0.attn_q"),
    "a model": (with_fields(general__type="model"), InvalidAdapterError, "general.type is model"),
    "a control vector": (
        with_fields(adapter__type="x"),
        InvalidAdapterError,
        "its adapter.type x; `adapter` and `lora` are needed",
    ),
    "aLoRA": (
        with_fields(adapter__alora__invocation_tokens=[5, 6]),
        UnsupportedFeatureError,
        "adapter.alora.invocation_tokens needs LoRA that begins within a prompt (aLoRA)",
    ),
    "an unknown feature": (
        with_fields(adapter__lora__rslora=True),
        UnsupportedFeatureError,
        "adapter.lora.rslora is unknown",
    ),
    "an alpha": (
        with_fields(adapter__lora__alpha=float("inf")),
        InvalidAdapterError,
        "adapter.lora.alpha must be a finite number, got inf",
    ),
    "an unknown architecture": (
        with_fields(general__architecture="mamba"),
        UnsupportedFeatureError,
        "architecture 'mamba' of GGUF is not supported; supported: llama, ",
    ),
    "another architecture": (
        with_fields(general__architecture="qwen3"),
        AdapterMismatchError,
        "of the architecture qwen3 (Qwen3ForCausalLM); the base model is MistralForCausalLM",
    ),
    "nothing": (gguf_bytes(FIELDS, {}), InvalidAdapterError, "has no tensors"),
    "no B": (
        gguf_bytes(FIELDS, {f"{Q}a": A}),
        InvalidAdapterError,
        "blk.0.attn_q.weight.lora_a has no partner blk.0.attn_q.weight.lora_b",
    ),
    "a norm": (
        gguf_bytes(FIELDS, {"blk.0.attn_norm.weight": ("F32", (HIDDEN,), bytes(4 * HIDDEN))}),
        UnsupportedFeatureError,
        "blk.0.attn_norm.weight is neither a .lora_a nor a .lora_b",
    ),
    "an unknown weight": (
        gguf_bytes(FIELDS, {"blk.0.ssm_in.weight.lora_a": A, "blk.0.ssm_in.weight.lora_b": B}),
        InvalidAdapterError,
        "unknown tensor blk.0.ssm_in.weight",
    ),
    "experts": (
        gguf_bytes(
            FIELDS,
            {
                "blk.0.ffn_gate_exps.weight.lora_a": A,
                "blk.0.ffn_gate_exps.weight.lora_b": B,
            },
        ),
        InvalidAdapterError,
        "unknown tensor blk.0.ffn_gate_exps.weight",
    ),
    "a vector": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (4,), bytes(16)), f"{Q}b": B}),
        InvalidAdapterError,
        "lora_a has shape [4]; a matrix",
    ),
    "an empty matrix": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (0, HIDDEN), b""), f"{Q}b": B}),
        InvalidAdapterError,
        "a matrix with at least one row",
    ),
    "different ranks": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (3, HIDDEN), bytes(12 * HIDDEN)), f"{Q}b": B}),
        InvalidAdapterError,
        "have different ranks",
    ),
    "transposed": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (HIDDEN, 2), bytes(8 * HIDDEN)), f"{Q}b": B}),
        InvalidAdapterError,
        "have different ranks",
    ),
    "parts of heads": (
        gguf_bytes(FIELDS, {f"{Q}a": A, f"{Q}b": ("F32", (12, 2), bytes(96))}),
        InvalidAdapterError,
        "has 12 rows, no multiple of 8",
    ),
    "a wrong size": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (2, 32), bytes(256)), f"{Q}b": B}),
        AdapterMismatchError,
        "the base model needs [2, 64]",
    ),
    "a wrong layer": (
        gguf_bytes(FIELDS, {f"blk.7{Q[5:]}a": A, f"blk.7{Q[5:]}b": B}),
        AdapterMismatchError,
        "belongs to layer 7; the base model has 2 layers",
    ),
    "NaN": (
        gguf_bytes(FIELDS, {f"{Q}a": ("F32", (2, 32), NAN), f"{Q}b": B}),
        InvalidAdapterError,
        "holds NaN or infinity",
    ),
    "a type": (
        gguf_bytes(FIELDS, {f"{Q}a": ("Q4_0", (2, HIDDEN), bytes(72)), f"{Q}b": B}),
        UnsupportedFeatureError,
        "is Q4_0; read from adapters are F32, F16, BF16 and Q8_0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, staged: Stage, tmp_path: Path) -> None:
    content, error, message = REFUSED[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=re.escape(message)):
        staged(path)
    assert not list((tmp_path / "state").rglob("*.safetensors"))


def test_limits(staged: Stage, write: Callable[..., Path]) -> None:
    path = write()
    for limits, error, message in (
        (StagingLimits(max_tensors=3), AdapterTooLargeError, "declares 14 tensors; at most 3"),
        (StagingLimits(max_file_bytes=99), AdapterTooLargeError, "at most 99 B are read"),
        (StagingLimits(max_header_bytes=99), InvalidAdapterError, "within 99 bytes"),
    ):
        with pytest.raises(error, match=message):
            staged(path, limits=limits)


def test_tensors_that_share_bytes_are_refused(staged: Stage, tmp_path: Path) -> None:
    """A small file must not become a large adapter."""
    # The offset of each tensor is the number of bytes before it.
    tensors = {f"blk.{n}.attn_q.weight.lora_a": (*A[:2], b"" if n < 8 else A[2]) for n in range(9)}
    path = tmp_path / "shared.gguf"
    path.write_bytes(gguf_bytes(FIELDS, tensors))
    with pytest.raises(InvalidAdapterError, match=naming("shared.gguf")):
        staged(path)


def test_files_cut_off_anywhere_are_refused(staged: Stage, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for end in range(0, len(WHOLE), 7):
        path.write_bytes(WHOLE[:end])
        with pytest.raises(LoraplexError):
            staged(path)
