"""Reading config.json: every family, old and new field names, and refusals that name the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.registry import ARCHITECTURES, read_config
from loraplex.models.spec import FeedForwardSpec, ModelSpec, NormPlace
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import NormSpec, RopeConfig
from support.naming import naming

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, values: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values | changes))
    return read_config(folder)


def llama(folder: Path, **changes: Any) -> ModelSpec:
    return read(folder, LLAMA, **changes)


def layer_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in spec.layers)


def biased(spec: ModelSpec) -> list[str]:
    return [name for name, group in spec.layers[0].linears.items() if group.has_bias]


def test_llama(tmp_path: Path) -> None:
    spec = llama(tmp_path)
    layers = spec.layers
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        vocab_size=100,
        layers=layers,
        final_norm=NormSpec("model.norm", 64, 1e-5),
        names=LLAMA_NAMES,
        max_position_embeddings=256,
        default_max_model_len=256,
        hidden_act="silu",
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    )
    assert spec.num_layers == 3
    for layer in layers:
        assert layer.mixer == AttentionSpec(
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(original_max_position_embeddings=256),
        )
        assert layer.feed_forward == FeedForwardSpec(
            inner_size=96, activation=Activation.SILU, is_gated=True
        )
    assert layers[2].norms == {
        NormPlace.BEFORE_MIXER: NormSpec("model.layers.2.input_layernorm", 64, 1e-5),
        NormPlace.BEFORE_FEED_FORWARD: NormSpec(
            "model.layers.2.post_attention_layernorm", 64, 1e-5
        ),
    }
    assert biased(spec) == []


def test_llama_biases(tmp_path: Path) -> None:
    spec = llama(tmp_path, attention_bias=True, mlp_bias=True, head_dim=24)
    assert biased(spec) == ["qkv", "o", "up", "down"]
    assert (spec.layers[0].mixer.q_size, spec.layers[0].mixer.kv_size) == (96, 48)


def test_absent_and_null_fields_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = llama(
        tmp_path, num_key_value_heads=None, max_position_embeddings=None, torch_dtype=None
    )
    assert config.layers[0].mixer.num_kv_heads == 4
    assert config.max_position_embeddings == 2048
    assert config.dtype is None


def test_new_name_of_the_dtype(tmp_path: Path) -> None:
    assert llama(tmp_path, dtype="float16").dtype == "float16"


def test_mistral_has_one_window_for_all_or_the_named_layers(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert layer_windows(read(tmp_path, mistral, sliding_window=32)) == (32, 32, 32)
    assert layer_windows(read(tmp_path, mistral, sliding_window=None)) == (None, None, None)
    assert layer_windows(read(tmp_path, mistral)) == (4096, 4096, 4096)
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    mixed = read(tmp_path, mistral, sliding_window=32, layer_types=layer_types)
    assert layer_windows(mixed) == (None, 32, None)


def test_a_part_of_heads_does_not_rotate_where_transformers_rotates_whole_ones(
    tmp_path: Path,
) -> None:
    def rotary_dim(**rope: Any) -> int:
        attention = llama(tmp_path, **rope).layers[0].mixer
        assert attention.rope is not None
        return attention.rope.rotary_dim(attention.head_dim)

    assert rotary_dim(partial_rotary_factor=0.5) == 16
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert rotary_dim(rope_parameters=rope) == 16
    with pytest.raises(UnsupportedModelError, match=naming("partial_rotary_factor", "linear")):
        rotary_dim(rope_parameters=rope | {"partial_rotary_factor": 0.5})


def test_qwen2_has_biases_and_windows_where_it_says(tmp_path: Path) -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    config = read(tmp_path, qwen)
    assert biased(config) == ["qkv"]
    assert config.layers[0].mixer.q_norm is None
    assert layer_windows(config) == (None, None, None)
    config = read(tmp_path, qwen, use_sliding_window=True, max_window_layers=2)
    assert layer_windows(config) == (None, None, 32)
    config = read(tmp_path, qwen, use_sliding_window=True, max_window_layers=0)
    assert layer_windows(config) == (32, 32, 32)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read(tmp_path, qwen, use_sliding_window=True, layer_types=layer_types)
    assert layer_windows(config) == (32, None, 32)


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [(["full_attention"], "has 1 entries"), (["linear_attention"] * 3, "'linear_attention'")],
)
def test_bad_layer_types(tmp_path: Path, layer_types: list[str], message: str) -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, qwen, layer_types=layer_types)


def test_what_reads_later_positions_has_no_output_layer(tmp_path: Path) -> None:
    for name, changes in (
        ("LlamaForCausalLM", {"is_causal": False}),
        ("Qwen3Model", {"is_causal": False}),
        ("LlamaBidirectionalModel", {"pooling": "avg"}),
    ):
        spec = llama(tmp_path, architectures=[name], tie_word_embeddings=True, **changes)
        assert (spec.is_causal, spec.has_lm_head, spec.tie_word_embeddings) == (False,) * 3
    # The window of transformers for both directions is one longer.
    fields = {"architectures": ["MistralModel"], "sliding_window": 9, "is_causal": False}
    assert layer_windows(llama(tmp_path, **fields)) == (10,) * spec.num_layers
    causal = llama(tmp_path, **fields | {"is_causal": True})
    assert (causal.is_causal, layer_windows(causal)) == (True, (9,) * spec.num_layers)


def test_qwen3_has_norms_and_its_own_head_size(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, architectures=["Qwen3ForCausalLM"])
    attention = config.layers[2].mixer
    assert attention.q_norm == NormSpec("model.layers.2.self_attn.q_norm", 128, 1e-5)
    assert attention.k_norm == NormSpec("model.layers.2.self_attn.k_norm", 128, 1e-5)
    assert (biased(config), attention.head_dim) == ([], 128)


@pytest.mark.parametrize("style", ["old", "new", "older name of the type"])
def test_rope_in_old_and_new_style(tmp_path: Path, style: str) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    changes: dict[str, dict[str, Any]] = {
        "old": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        "new": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}},
        "older name of the type": {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **scaling},
        },
    }
    assert llama(tmp_path, **changes[style]).layers[0].mixer.rope == RopeConfig(
        rope_type="llama3",
        theta=5e5,
        factor=8.0,
        original_max_position_embeddings=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_yarn_derives_an_absent_factor_from_the_lengths(tmp_path: Path) -> None:
    spec = llama(tmp_path, original_max_position_embeddings=64, rope_scaling={"rope_type": "yarn"})
    rope = spec.layers[0].mixer.rope
    assert rope is not None
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 64)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
    ],
)
def test_default_length(tmp_path: Path, rope: dict[str, Any], length: int) -> None:
    assert llama(tmp_path, rope_parameters=rope).default_max_model_len == length


def test_end_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert llama(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert llama(tmp_path).eos_token_ids == (8,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert llama(tmp_path).eos_token_ids == (2,)


def test_module_shapes_are_in_and_out(tmp_path: Path) -> None:
    assert llama(tmp_path, head_dim=24).layers[0].module_shapes == {
        "q_proj": (64, 96),
        "k_proj": (64, 48),
        "v_proj": (64, 48),
        "o_proj": (96, 64),
        "gate_proj": (64, 96),
        "up_proj": (64, 96),
        "down_proj": (96, 64),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            ("MambaForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        ),
        (
            {"quantization_config": {"bits": 4}},
            ("quantization_config", "quant_method", "fbgemm_fp8"),
        ),
        ({"num_local_experts": 8}, ("num_local_experts",)),
        ({"hidden_act": "mish"}, ("hidden_act", "mish", "gelu_new")),
        ({"torch_dtype": "float8_e4m3fn"}, ("float8_e4m3fn",)),
        ({"rope_scaling": {"type": "mrope"}}, ("mrope",)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            ("rope_parameters", "full_attention"),
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        llama(tmp_path, **changes)


def test_an_unknown_architecture_is_refused_with_all_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        llama(tmp_path, architectures=["Foo"])
    assert all(name in caught.value.message for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, ("hidden_size",)),
        ({"hidden_size": "64"}, ("hidden_size", 64)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", 1, 0)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", 4096)),
        ({"vocab_size": True}, ("vocab_size",)),
        ({"rms_norm_eps": "small"}, ("rms_norm_eps", "small")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings", 1)),
        ({"architectures": []}, ("architectures",)),
        ({"architectures": "LlamaForCausalLM"}, ("architectures", "LlamaForCausalLM")),
        ({"eos_token_id": "2"}, ("eos_token_id", 2)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", 3, "num_attention_heads")),
        ({"head_dim": 15}, ("head_dim", 15)),
        ({"rope_scaling": [1]}, ("rope_scaling", "[1]")),
        ({"rope_scaling": {"type": "linear"}}, ("rope_scaling",)),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ("rope_scaling", "rope_theta")),
        ({"rope_theta": "big"}, ("rope_theta", "big")),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            ("short_factor", 8, "rope_scaling", 1),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}},
            ("high_freq_factor", "rope_scaling"),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 5,
                    "high_freq_factor": 4,
                }
            },
            ("high_freq_factor", "rope_scaling", "low_freq_factor", 5, 4),
        ),
    ],
)
def test_errors_name_file_and_field(
    tmp_path: Path, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)) as caught:
        llama(tmp_path, **changes)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_broken_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("config.json")):
        read_config(tmp_path)
