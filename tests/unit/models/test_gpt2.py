"""GPT-2's config.json: its own names, the defaults of old files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.sizing.kv import wanted_model_len
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.weights.size import weights_size
from loraplex.kernels.activations import Activation
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV
from loraplex.models.specs.part import NormKind
from support.naming import naming

FIELDS = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 100,
    "n_inner": 80,
    "vocab_size": 50,
    "eos_token_id": 49,
    "layer_norm_epsilon": 1e-6,
    "activation_function": "relu",
    "tie_word_embeddings": False,
}


def gpt2(folder: Path, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(FIELDS | changes))
    return read_config(folder)


def test_every_field(tmp_path: Path) -> None:
    config = gpt2(tmp_path)
    attention, feed_forward = config.layers[2].mixer, config.layers[2].feed_forward
    sizes = (config.hidden_size, attention.num_heads, attention.num_kv_heads, attention.head_dim)
    assert sizes == (64, 4, 4, 16)
    assert (config.num_layers, feed_forward.inner_size, config.vocab_size) == (3, 80, 50)
    assert (config.max_position_embeddings, config.default_max_model_len) == (100, 100)
    assert (config.final_norm.eps, config.hidden_act) == (1e-6, "relu")
    norms = (config.final_norm, *config.layers[2].norms.values())
    assert {norm.kind for norm in norms} == {NormKind.LAYER}
    assert (attention.rope, attention.window, config.has_position_table) == (None, None, True)
    assert (feed_forward.activation, feed_forward.is_gated) == (Activation.RELU, False)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((49,), False)


def test_what_old_files_leave_out(tmp_path: Path) -> None:
    absent = ("n_inner", "n_positions", "layer_norm_epsilon", "activation_function")
    config = gpt2(tmp_path, **dict.fromkeys((*absent, "tie_word_embeddings")))
    feed_forward = config.layers[0].feed_forward
    assert (feed_forward.inner_size, config.max_position_embeddings) == (256, 1024)
    assert (config.final_norm.eps, config.hidden_act) == (1e-5, "gelu_new")
    assert feed_forward.activation is Activation.GELU_TANH
    assert config.tie_word_embeddings


def test_scales_of_the_scores(tmp_path: Path) -> None:
    def scales(**changes: bool) -> list[float | None]:
        return [layer.mixer.scale for layer in gpt2(tmp_path, **changes).layers]

    assert scales() == scales(reorder_and_upcast_attn=True) == [None] * 3
    assert scales(scale_attn_weights=False) == [1.0] * 3
    assert scales(scale_attn_by_inverse_layer_idx=True) == [1 / 4, 1 / 8, 1 / 12]
    both = scales(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert both == [1, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"add_cross_attention": True}, ("add_cross_attention",)),
        ({"activation_function": "tanh"}, ("activation_function", "tanh", "gelu_new")),
        (
            {"quantization_config": {"bits": 4}},
            ("quantization_config", "quant_method", "fbgemm_fp8"),
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        gpt2(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_embd": None}, ("n_embd",)),
        ({"n_head": 5}, ("n_embd", 64, "n_head", 5)),
        ({"n_head": 64}, ("head_dim",)),
        ({"scale_attn_weights": 1}, ("scale_attn_weights", 1)),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        gpt2(tmp_path, **changes)


def test_modules_are_called_so_that_no_two_are_alike(tmp_path: Path) -> None:
    layer = gpt2(tmp_path).layers[0]
    assert layer.module_shapes == {
        "attn.c_attn": (64, 192),
        "attn.c_proj": (64, 64),
        "mlp.c_fc": (64, 80),
        "mlp.c_proj": (80, 64),
    }
    assert layer.biased_modules == tuple(layer.module_shapes)
    assert layer.linears[QKV].first_outputs == (0,)


def test_the_checkpoint_s_tensors(tmp_path: Path) -> None:
    shapes = checkpoint_shapes(gpt2(tmp_path, n_layer=1))
    assert shapes == {
        "transformer.wte.weight": (50, 64),
        "transformer.wpe.weight": (100, 64),
        "transformer.h.0.ln_1.weight": (64,),
        "transformer.h.0.ln_1.bias": (64,),
        "transformer.h.0.ln_2.weight": (64,),
        "transformer.h.0.ln_2.bias": (64,),
        "transformer.h.0.attn.c_attn.weight": (64, 192),
        "transformer.h.0.attn.c_attn.bias": (192,),
        "transformer.h.0.attn.c_proj.weight": (64, 64),
        "transformer.h.0.attn.c_proj.bias": (64,),
        "transformer.h.0.mlp.c_fc.weight": (64, 80),
        "transformer.h.0.mlp.c_fc.bias": (80,),
        "transformer.h.0.mlp.c_proj.weight": (80, 64),
        "transformer.h.0.mlp.c_proj.bias": (64,),
        "transformer.ln_f.weight": (64,),
        "transformer.ln_f.bias": (64,),
        "lm_head.weight": (50, 64),
    }


def test_the_size_of_its_weights(tmp_path: Path) -> None:
    config = gpt2(tmp_path)
    layer = 192 * 65 + 64 * 65 + 80 * 65 + 64 * 81 + 4 * 64
    expected = 2 * 50 * 64 + 100 * 64 + 3 * layer + 2 * 64
    assert weights_size(config, torch.float32, WeightPrecision.NATIVE) == 4 * expected


def test_no_sequence_is_longer_than_the_table_of_positions(tmp_path: Path) -> None:
    config = gpt2(tmp_path)
    assert wanted_model_len(RunnerSettings(), config) == 100
    with pytest.raises(ConfigError, match=naming(101, 100)):
        wanted_model_len(RunnerSettings(max_model_len=101), config)
