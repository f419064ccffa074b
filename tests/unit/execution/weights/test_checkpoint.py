"""Loading weights: every file layout, fused places, and an error that names each thing amiss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    pack_checkpoint,
)
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.ops import PackedLinear
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.spec import NormPlace
from support.naming import naming
from support.tiny_model import TinyCheckpoint

CPU = torch.device("cpu")
KERNELS = ReferenceKernels(CPU)


def load(checkpoint: TinyCheckpoint, dtype: torch.dtype = torch.float32) -> PackedWeights:
    form = WeightFormat(dtype=dtype)
    return pack_checkpoint(checkpoint.folder, checkpoint.config, KERNELS, form)


def weight_of(packed: PackedLinear) -> torch.Tensor:
    weight, _ = KERNELS.linear_parts(packed).tensors
    assert weight is not None
    return weight


def check(weights: PackedWeights, tensors: dict[str, torch.Tensor]) -> None:
    parameters, prefix = weights.parameters, "model.layers.1."
    layer = parameters.layers[1]
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(weight_of(layer.linears["qkv"]), torch.cat(qkv))
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(weight_of(layer.linears["up"]), torch.cat(gate_up))
    assert torch.equal(weight_of(layer.linears["o"]), tensors[prefix + "self_attn.o_proj.weight"])
    assert torch.equal(weight_of(layer.linears["down"]), tensors[prefix + "mlp.down_proj.weight"])
    assert torch.equal(
        layer.norms[NormPlace.BEFORE_MIXER].weight, tensors[prefix + "input_layernorm.weight"]
    )
    name = prefix + "post_attention_layernorm.weight"
    assert torch.equal(layer.norms[NormPlace.BEFORE_FEED_FORWARD].weight, tensors[name])
    embedding = parameters.embedding
    if parameters.packed_embedding is not None:
        assert not len(embedding)
        embedding = weight_of(parameters.packed_embedding)
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(parameters.final_norm.weight, tensors["model.norm.weight"])


def write_shards(checkpoint: TinyCheckpoint, suffix: str) -> None:
    """Two files and their index, alternating."""
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(checkpoint.tensors)}
    for name in names:
        part = {k: v for k, v in checkpoint.tensors.items() if weight_map[k] == name}
        if suffix == "bin":
            torch.save(part, checkpoint.folder / name)
        else:
            save_file(part, checkpoint.folder / name)
    index = checkpoint.folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_safetensors_file(tiny_checkpoint: TinyCheckpoint) -> None:
    tiny_checkpoint.save()
    weights = load(tiny_checkpoint)
    check(weights, tiny_checkpoint.tensors)
    lm_head = weight_of(weights.parameters.lm_head)
    assert torch.equal(lm_head, tiny_checkpoint.tensors["lm_head.weight"])
    num_elements = sum(tensor.numel() for tensor in tiny_checkpoint.tensors.values())
    assert weights.num_bytes == 4 * num_elements


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(tiny_checkpoint: TinyCheckpoint, suffix: str) -> None:
    write_shards(tiny_checkpoint, suffix)
    check(load(tiny_checkpoint), tiny_checkpoint.tensors)


def test_one_pickled_file(tiny_checkpoint: TinyCheckpoint) -> None:
    torch.save(tiny_checkpoint.tensors, tiny_checkpoint.folder / "pytorch_model.bin")
    check(load(tiny_checkpoint), tiny_checkpoint.tensors)


def test_safetensors_come_before_pickled_files(tiny_checkpoint: TinyCheckpoint) -> None:
    (tiny_checkpoint.save() / "pytorch_model.bin").write_bytes(b"not read")
    assert [path.name for path in weight_files(tiny_checkpoint.folder)] == ["model.safetensors"]


def test_tied_embeddings(tmp_path: Path) -> None:
    """A stored lm_head that is the embedding is redundant, not unknown."""
    tied_checkpoint = TinyCheckpoint(tmp_path, tie_word_embeddings=True)
    tied_checkpoint.tensors["lm_head.weight"] = tied_checkpoint.tensors[
        "model.embed_tokens.weight"
    ].clone()
    tied_checkpoint.save()
    weights = load(tied_checkpoint)
    check(weights, tied_checkpoint.tensors)
    parameters = weights.parameters
    assert parameters.packed_embedding is parameters.lm_head


def test_conversion_to_the_served_dtype(tiny_checkpoint: TinyCheckpoint) -> None:
    tiny_checkpoint.save()
    weights = load(tiny_checkpoint, torch.bfloat16)
    expected = tiny_checkpoint.tensors["model.norm.weight"].bfloat16()
    assert torch.equal(weights.parameters.final_norm.weight, expected)


def test_old_rotary_buffers_are_no_weights(tiny_checkpoint: TinyCheckpoint) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tiny_checkpoint.tensors[name] = torch.zeros(2)
    tiny_checkpoint.save()
    check(load(tiny_checkpoint), tiny_checkpoint.tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("model.layers.0.mlp.up_proj.weight", None, (1, "model.layers.0.mlp.up_proj.weight")),
        ("lm_head.weight", None, ("lm_head", "lm_head.weight")),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.zeros(2),
            ("model.layers.2.mlp", "model.layers.2.mlp.up_proj.weight"),
        ),
        (
            "model.layers.0.self_attn.q_proj.bias",
            torch.ones(16),
            ("model.layers.0.self_attn.q_proj.bias",),
        ),
        ("model.layers.0.self_attn.bias", torch.zeros(16), ("model.layers.0.self_attn.bias",)),
        ("model.norm.weight", torch.zeros(17), ("model.norm.weight", "[17]", "[16]")),
        (
            "model.norm.weight",
            torch.zeros(16, dtype=torch.int8),
            ("model.norm.weight", "torch.int8"),
        ),
    ],
)
def test_what_is_wrong_is_named(
    tiny_checkpoint: TinyCheckpoint,
    name: str,
    tensor: torch.Tensor | None,
    named: tuple[object, ...],
) -> None:
    if tensor is None:
        del tiny_checkpoint.tensors[name]
    else:
        tiny_checkpoint.tensors[name] = tensor
    tiny_checkpoint.save()
    with pytest.raises(ConfigError, match=naming(*named)):
        load(tiny_checkpoint)


def test_a_weight_that_is_there_twice(tiny_checkpoint: TinyCheckpoint) -> None:
    write_shards(tiny_checkpoint, "safetensors")
    save_file(tiny_checkpoint.tensors, tiny_checkpoint.folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=naming("lm_head.weight")):
        load(tiny_checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (None, b"", ("model.safetensors", "pytorch_model.bin")),
        ("model.safetensors", b"garbage", ("model.safetensors",)),
        ("pytorch_model.bin", b"garbage", ("pytorch_model.bin",)),
        ("model.safetensors.index.json", b"{}", ("weight_map",)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', ("../b",)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b"}}', ("b",)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', ("weight_map", 1)),
    ],
)
def test_broken_files(
    tiny_checkpoint: TinyCheckpoint, file: str | None, content: bytes, named: tuple[object, ...]
) -> None:
    if file:
        (tiny_checkpoint.folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=naming(*named)):
        load(tiny_checkpoint)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


def test_a_pickle_cannot_run_code(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_checkpoint.folder)
    torch.save({"model.norm.weight": Harmful()}, tiny_checkpoint.folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="UnpicklingError"):
        load(tiny_checkpoint)
    assert not Path("harm").exists()


def test_a_pickled_file_must_be_a_state_dict(tiny_checkpoint: TinyCheckpoint) -> None:
    torch.save([1], tiny_checkpoint.folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=naming("pytorch_model.bin")):
        load(tiny_checkpoint)


def test_gpt2_s_transposed_weights_with_and_without_the_names_root(tmp_path: Path) -> None:
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 8}
    checkpoint = TinyCheckpoint(tmp_path, architectures=["GPT2LMHeadModel"], **sizes)
    full = checkpoint.tensors
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in full.items()} | masks
    for tensors in (full, bare):
        save_file(tensors, checkpoint.folder / "model.safetensors")
        parameters = load(checkpoint).parameters
        layer, prefix = parameters.layers[1], "transformer.h.1."
        weight, bias = KERNELS.linear_parts(layer.linears["qkv"]).tensors
        assert weight is not None
        assert bias is not None
        assert torch.equal(weight, full[f"{prefix}attn.c_attn.weight"].T)
        assert torch.equal(bias, full[f"{prefix}attn.c_attn.bias"])
        # A square one: no shape would show that it is stored [in, out].
        assert torch.equal(weight_of(layer.linears["o"]), full[f"{prefix}attn.c_proj.weight"].T)
        assert torch.equal(weight_of(layer.linears["up"]), full[f"{prefix}mlp.c_fc.weight"].T)
        assert torch.equal(weight_of(layer.linears["down"]), full[f"{prefix}mlp.c_proj.weight"].T)
        assert parameters.positions is not None
        assert torch.equal(parameters.positions, full["transformer.wpe.weight"])
        assert torch.equal(layer.norms[NormPlace.BEFORE_MIXER].weight, full[f"{prefix}ln_1.weight"])
        assert layer.norms[NormPlace.BEFORE_MIXER].bias is not None
        assert torch.equal(layer.norms[NormPlace.BEFORE_MIXER].bias, full[f"{prefix}ln_1.bias"])
        assert torch.equal(weight_of(parameters.lm_head), full["transformer.wte.weight"])
