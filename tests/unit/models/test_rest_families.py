"""Families from Phi 2 to Baichuan: the descriptions of real models, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.formats.peft_names import parse_name
from loraplex.app.builder import base_shapes
from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.family_config import alibi_slopes, heads_in_groups
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.part import NormKind
from support.families.real_rest import CONFIGS, TENSORS
from support.naming import naming


def read(folder: Path, name: str, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return read_config(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_of_the_real_files(tmp_path: Path, name: str) -> None:
    spec = read(tmp_path, name)
    expected = {
        tensor.format(layer): shape
        for tensor, shape in TENSORS[name].items()
        for layer in range(spec.num_layers if "{}" in tensor else 1)
    }
    assert checkpoint_shapes(spec) == expected
    assert {spec.names.canonical(tensor) for tensor in expected} == set(expected)
    root = spec.names.root
    assert {spec.names.canonical(tensor.removeprefix(root)) for tensor in expected} == set(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_every_linear_layer_are_understood(tmp_path: Path, name: str) -> None:
    layers = read(tmp_path, name).layers
    for index, layer in enumerate(layers):
        found = set()
        for group in layer.linears.values():
            for path in group.paths:
                parsed = parse_name(f"base_model.model.{path}.lora_A.weight")
                assert parsed is not None, path
                assert parsed.layer == index
                found.add(parsed.module)
        assert found == set(layer.module_shapes)


def attention(spec: ModelSpec, index: int = 0) -> tuple[Any, ...]:
    """(rotary size, whether pairs turn, window, number of key heads)"""
    part = spec.layers[index].mixer
    rope = part.rope
    rotary = None if rope is None else rope.rotary_dim(part.head_dim)
    return (rotary, rope and rope.is_interleaved, part.window, part.num_kv_heads)


def feed_forward(layer: LayerSpec) -> tuple[Activation, bool, bool, int]:
    part = layer.feed_forward
    return (part.activation, part.is_gated, layer.is_parallel, len(layer.norms))


@pytest.mark.parametrize(
    ("name", "of_attention", "of_feed_forward"),
    [
        ("phi-2", (32, False, None, 32), (Activation.GELU_TANH, False, True, 1)),
        ("gpt-neox-20b", (24, False, None, 64), (Activation.GELU_TANH, False, True, 2)),
        ("starcoder2-7b", (128, False, 4096, 4), (Activation.GELU_TANH, False, False, 2)),
        ("c4ai-command-r-v01", (128, True, None, 64), (Activation.SILU, True, True, 1)),
        ("c4ai-command-r7b-12-2024", (128, True, 4096, 8), (Activation.SILU, True, True, 1)),
        ("SmolLM3-3B", (128, False, None, 4), (Activation.SILU, True, False, 2)),
        ("internlm3-8b-instruct", (128, False, None, 2), (Activation.SILU, True, False, 2)),
        ("internlm2-chat-7b", (128, False, None, 8), (Activation.SILU, True, False, 2)),
        ("falcon-7b", (64, False, None, 1), (Activation.GELU, False, True, 1)),
        ("falcon-40b", (64, False, None, 8), (Activation.GELU, False, True, 2)),
        ("falcon-rw-1b", (None, None, None, 32), (Activation.GELU, False, False, 2)),
        ("bloom-560m", (None, None, None, 16), (Activation.GELU_TANH, False, False, 2)),
        ("gpt-j-6b", (64, True, None, 16), (Activation.GELU_TANH, False, True, 1)),
        ("opt-350m", (None, None, None, 16), (Activation.RELU, False, False, 2)),
        ("opt-1.3b", (None, None, None, 32), (Activation.RELU, False, False, 2)),
        ("Baichuan-7B", (128, False, None, 32), (Activation.SILU, True, False, 2)),
        ("Baichuan2-13B-Chat", (None, None, None, 40), (Activation.SILU, True, False, 2)),
    ],
)
def test_traits_of_the_real_models(
    tmp_path: Path, name: str, of_attention: tuple[Any, ...], of_feed_forward: tuple[Any, ...]
) -> None:
    spec = read(tmp_path, name)
    assert attention(spec) == of_attention
    assert feed_forward(spec.layers[-1]) == of_feed_forward
    is_rms = name.startswith(("SmolLM", "internlm", "Baichuan"))
    assert spec.final_norm.kind is (NormKind.RMS if is_rms else NormKind.LAYER)
    assert spec.has_lm_head_bias == (name in ("phi-2", "gpt-j-6b"))
    assert (spec.logits_factor == 1.0) == (not name.startswith("c4ai"))


def test_layers_without_rotation(tmp_path: Path) -> None:
    cohere = read(tmp_path, "c4ai-command-r7b-12-2024")
    assert [attention(cohere, n)[::2] for n in range(2, 5)] == [
        (128, 4096),
        (None, None),
        (128, 4096),
    ]
    assert cohere.logits_factor == 0.25
    smollm = read(tmp_path, "SmolLM3-3B", use_sliding_window=True, sliding_window=9)
    found = [attention(smollm, n)[::2] for n in range(2, 5)]
    assert found == [(128, None), (None, None), (128, None)]
    smollm = read(
        tmp_path, "SmolLM3-3B", use_sliding_window=True, sliding_window=9, layer_types=None
    )
    assert attention(smollm, 3)[::2] == (None, 9)


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    def rope_of(name: str, *absent: str) -> tuple[float, int]:
        part = read(tmp_path, name, **dict.fromkeys(absent)).layers[0].mixer
        assert part.rope is not None
        return part.rope.theta, part.rope.rotary_dim(part.head_dim)

    assert rope_of("phi-2", "partial_rotary_factor", "rope_theta") == (1e4, 40)
    assert rope_of("gpt-neox-20b", "rotary_pct", "rotary_emb_base") == (1e4, 24)
    assert rope_of("c4ai-command-r-v01", "rope_theta") == (5e5, 128)
    assert rope_of("c4ai-command-r7b-12-2024", "rope_theta") == (1e4, 128)
    assert rope_of("SmolLM3-3B", "rope_theta") == (2e6, 128)
    assert rope_of("gpt-j-6b", "rotary_dim") == (1e4, 64)
    assert read(tmp_path, "c4ai-command-r-v01", logit_scale=None).logits_factor == 0.0625
    tied = {"starcoder2-7b", "c4ai-command-r-v01", "c4ai-command-r7b-12-2024", "SmolLM3-3B"}
    tied |= {"opt-350m", "opt-1.3b", "falcon-7b", "falcon-40b", "falcon-rw-1b", "bloom-560m"}
    for name in CONFIGS:
        assert read(tmp_path, name, tie_word_embeddings=None).tie_word_embeddings == (name in tied)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("starcoder2-7b", {"norm_type": "rms"}, ("norm_type", "rms")),
        ("starcoder2-7b", {"mlp_type": "gated"}, ("mlp_type", "gated")),
        (
            "bloom-560m",
            {"apply_residual_connection_post_layernorm": True},
            ("apply_residual_connection_post_layernorm",),
        ),
        ("bloom-560m", {"slow_but_exact": True}, ("slow_but_exact",)),
        ("opt-1.3b", {"_remove_final_layer_norm": True}, ("_remove_final_layer_norm",)),
        (
            "opt-1.3b",
            {"layer_norm_elementwise_affine": False},
            ("layer_norm_elementwise_affine",),
        ),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, ("num_ln_in_parallel_attn", 2)),
        ("phi-2", {"hidden_act": "tanh"}, ("hidden_act", "tanh", "gelu_new")),
        (
            "gpt-neox-20b",
            {"quantization_config": {"bits": 4}},
            ("quantization_config", "quant_method", "fbgemm_fp8"),
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        read(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gpt-j-6b", {"rotary_dim": 258}, ("rotary_dim", 256, 258)),
        ("gpt-j-6b", {"rotary_dim": 7}, ("rotary_dim", 7)),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, ("no_rope_layers", 2, "num_hidden_layers")),
        (
            "internlm2-chat-7b",
            {"num_key_value_heads": 5},
            ("num_key_value_heads", 5, "num_attention_heads"),
        ),
    ],
)
def test_broken_fields(
    tmp_path: Path, name: str, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        read(tmp_path, name, **changes)


def test_names_of_the_first_falcon_and_bloom_files(tmp_path: Path) -> None:
    falcon = CONFIGS["falcon-40b"]
    sizes = ("num_attention_heads", "num_hidden_layers", "num_kv_heads", "hidden_size")
    new_names = {name: falcon[name] for name in sizes}
    old_names = dict(
        zip(("n_head", "n_layer", "n_head_kv", "n_embed"), new_names.values(), strict=True)
    )
    old = read(tmp_path, "falcon-40b", **dict.fromkeys(sizes), **old_names)
    assert old == read(tmp_path, "falcon-40b")
    old = read(tmp_path, "bloom-560m", hidden_size=None, n_embed=1024)
    assert old == read(tmp_path, "bloom-560m")


def test_gptj_rotates_as_many_elements_as_it_says(tmp_path: Path) -> None:
    for head_dim in range(4, 140, 2):
        for rotary_dim in range(2, head_dim + 1, 2):
            changes = {"n_embd": 2 * head_dim, "n_head": 2, "n_layer": 1}
            spec = read(tmp_path, "gpt-j-6b", rotary_dim=rotary_dim, **changes)
            assert attention(spec)[0] == rotary_dim


def test_norms_of_opt(tmp_path: Path) -> None:
    after, before = read(tmp_path, "opt-350m"), read(tmp_path, "opt-1.3b")
    assert (after.position_offset, after.embedding_size) == (2, 512)
    assert (before.position_offset, before.embedding_size) == (2, None)
    assert not before.layers[0].norms[NormPlace.BEFORE_MIXER].replaces_residual
    assert NormPlace.BEFORE_MIXER not in after.layers[0].norms
    norm = after.layers[5].norms[NormPlace.BEFORE_MIXER]
    assert (norm.path, norm.replaces_residual) == ("model.decoder.layers.4.final_layer_norm", True)
    assert after.final_norm.path == "model.decoder.layers.23.final_layer_norm"


def test_versions_of_baichuan(tmp_path: Path) -> None:
    spec = read(tmp_path, "Baichuan2-13B-Chat")
    assert (spec.max_position_embeddings, spec.has_unit_lm_head) == (4096, True)
    assert len(spec.layers[0].mixer.alibi_slopes) == 40
    # Baichuan 2 of 7B has the class name of the models with ALiBi.
    changes = {"hidden_size": 4096, "num_attention_heads": 32}
    assert attention(read(tmp_path, "Baichuan2-13B-Chat", **changes))[0] == 128
    assert not read(tmp_path, "Baichuan-7B").has_unit_lm_head


def test_adapters_of_ends_that_are_not_linear(tmp_path: Path) -> None:
    names = {name for name in CONFIGS if not base_shapes(read(tmp_path, name)).adapts_ends}
    assert names == {"opt-350m", "Baichuan2-13B-Chat"}
    biased = {
        name for name in CONFIGS if "lm_head" in base_shapes(read(tmp_path, name)).biased_modules
    }
    assert biased == {"phi-2", "gpt-j-6b"}


def test_head_orders() -> None:
    assert heads_in_groups(3, 3) == (0, 3, 6, 1, 4, 7, 2, 5, 8)
    assert heads_in_groups(4, 2) == (0, 1, 4, 5, 2, 6, 3, 7)
    assert heads_in_groups(4, 1) == ()


def test_alibi_slopes(tmp_path: Path) -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert alibi_slopes(1) == (2**-8,)
    bloom = read(tmp_path, "bloom-560m").layers[0].mixer
    assert bloom.alibi_slopes == pytest.approx([2 ** (-0.5 * n) for n in range(1, 17)])
    falcon = read(tmp_path, "falcon-rw-1b").layers[0].mixer
    # The first slope of 32 heads is 2 ** -0.25, as bfloat16 0.83984375.
    assert falcon.alibi_slopes[0] == 0.83984375 / math.sqrt(64)
