"""Published models with experts: what is read of their config.json, and what is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits
from loraplex.models.family_config import Traits, build_layer
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import (
    DOWN,
    ROUTER,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    FeedForwardSpec,
    ModelSpec,
)
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec
from loraplex.models.specs.part import NormKind, NormSpec
from support.families.published_experts_rest import GPT_OSS_20B, GRANITE_1B, PHI_3_5_MOE
from support.naming import naming


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_config(folder)


def biased(spec: ModelSpec) -> set[str]:
    return {name for name, group in spec.layers[0].linears.items() if group.has_bias}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GPT_OSS_20B, 20_914_757_184),
        (PHI_3_5_MOE, 41_873_153_344),
        (GRANITE_1B, 1_334_628_352),
    ],
    ids=["gpt-oss-20b", "phi-3.5-moe", "granite-3.0-1b-a400m"],
)
def test_number_of_parameters(tmp_path: Path, config: dict[str, Any], num_parameters: int) -> None:
    shapes = checkpoint_shapes(read(tmp_path, config))
    assert sum(map(math.prod, shapes.values())) == num_parameters


@pytest.mark.parametrize("config", [GPT_OSS_20B, GRANITE_1B], ids=["gpt-oss", "granite"])
def test_stacked_tensors_hold_every_tensor_of_an_expert(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    spec = read(tmp_path, config)
    found = [
        spec.names.layer(1) + part.format(expert=3)
        for stacked in spec.names.experts.stacked
        for part in stacked.parts
    ]
    assert len(set(found)) == len(found)
    names = [name for name in checkpoint_shapes(spec) if ".layers.1." in name]
    assert set(found) == {name for name in names if ".experts.3." in name}


def test_gpt_oss(tmp_path: Path) -> None:
    spec = read(tmp_path, GPT_OSS_20B)
    first, second = spec.layers[0], spec.layers[1]
    assert (first.mixer.window, second.mixer.window) == (128, None)
    assert first.mixer.sink_logits == "model.layers.0.self_attn.sinks"
    assert second.mixer.sink_logits == "model.layers.1.self_attn.sinks"
    assert (first.mixer.head_dim, first.mixer.num_kv_heads) == (64, 8)
    rope = first.mixer.rope
    assert rope is not None
    assert (rope.rope_type, rope.factor, rope.theta, rope.truncate) == ("yarn", 32.0, 15e4, False)
    assert biased(spec) == {QKV, OUTPUT, ROUTER, UP, DOWN}
    assert spec.final_norm.is_rounded_once
    assert all(norm.is_rounded_once for norm in first.norms.values())
    assert first.feed_forward == FeedForwardSpec(
        inner_size=2880,
        activation=Activation.CLAMPED_SWIGLU,
        is_gated=True,
        routing=RoutingRules(num_experts=32, num_chosen=4, mode=RoutingMode.CHOSEN_SOFTMAX),
    )
    assert spec.default_max_model_len == 131_072


def test_fields_of_gpt_oss_that_may_be_absent(tmp_path: Path) -> None:
    spec = read(tmp_path, GPT_OSS_20B)
    absent = ("layer_types", "rope_scaling", "rope_theta", "sliding_window", "head_dim")
    absent += ("swiglu_limit", "num_experts_per_tok", "attention_bias", "rms_norm_eps")
    assert read(tmp_path, GPT_OSS_20B, **dict.fromkeys(absent)) == spec
    assert biased(read(tmp_path, GPT_OSS_20B, attention_bias=False)) == {ROUTER, UP, DOWN}


def test_phi_3_5_moe(tmp_path: Path) -> None:
    spec = read(tmp_path, PHI_3_5_MOE)
    layer = spec.layers[31]
    assert biased(spec) == {QKV, OUTPUT}
    assert spec.has_lm_head_bias
    assert (spec.final_norm.kind, spec.final_norm.has_bias) == (NormKind.LAYER, True)
    assert layer.feed_forward.routing == RoutingRules(
        num_experts=16, num_chosen=2, mode=RoutingMode.SPARSE_MIXER, jitter=0.01
    )
    rope = layer.mixer.rope
    assert rope is not None
    assert (rope.rope_type, rope.attention_factor) == ("longrope", 1.243163121016122)
    assert (rope.original_max_position_embeddings, rope.recomputes) == (4096, True)
    # Other spellings of the class and of the fields.
    rope_parameters = {**PHI_3_5_MOE["rope_scaling"], "rope_type": "longrope", "rope_theta": 1e4}
    assert spec == read(
        tmp_path,
        PHI_3_5_MOE,
        architectures=["PhimoeForCausalLM"],
        rope_scaling=None,
        rope_theta=None,
        rope_parameters=rope_parameters,
    )


def test_granite_with_experts(tmp_path: Path) -> None:
    spec = read(tmp_path, GRANITE_1B)
    layer = spec.layers[0]
    factors = (spec.embedding_factor, layer.mixer.scale, layer.residual_factor)
    assert factors == (12.0, 0.015625, 0.22)
    assert spec.logits_factor == 1 / 6
    assert set(layer.linears) == {QKV, OUTPUT, ROUTER, UP, DOWN}
    assert layer.feed_forward.routing == RoutingRules(
        num_experts=32, num_chosen=8, mode=RoutingMode.CHOSEN_SOFTMAX
    )
    names = {"architectures": ["GraniteMoeSharedForCausalLM"]}
    shared = read(tmp_path, GRANITE_1B, shared_intermediate_size=640, **names).layers[0]
    assert shared.linears[SHARED_UP].outputs == {"shared_expert.gate_up_proj": 1280}
    assert shared.linears[SHARED_DOWN].in_features == 640
    for size in (0, None):
        changes = {"shared_intermediate_size": size, **names}
        assert set(read(tmp_path, GRANITE_1B, **changes).layers[0].linears) == set(layer.linears)


def test_several_shared_experts_are_one_of_their_size_together() -> None:
    """Describe DeepSeek's: n experts of inner size I give what one of n * I gives."""
    names = ExpertNames(
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
    routing = RoutingRules(
        num_experts=16,
        num_chosen=4,
        mode=RoutingMode.SIGMOID,
        normalizes=True,
        factor=2.5,
        num_groups=4,
        num_chosen_groups=2,
    )
    feed_forward = FeedForwardSpec(
        inner_size=24, activation=Activation.SILU, is_gated=True, routing=routing
    )
    traits = Traits(
        names=DecoderNames(experts=names),
        norm=NormSpec("", 32, 1e-6),
        experts=ExpertTraits(
            routing=routing, inner_size=24, shared_size=2 * 24, dense_layers=frozenset([0])
        ),
    )
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=None)
    dense = FeedForwardSpec(inner_size=48, activation=Activation.SILU, is_gated=True)
    layers = [build_layer(traits, index, 32, attention, dense) for index in (0, 1)]
    assert (layers[0].feed_forward, layers[1].feed_forward) == (dense, feed_forward)
    assert SHARED_UP not in layers[0].linears
    assert layers[1].module_shapes["shared_expert.up_proj"] == (32, 48)
    assert layers[1].module_shapes["shared_expert.down_proj"] == (48, 32)
    assert layers[1].module_shapes["experts.up_proj"] == (32, 24)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (
            GPT_OSS_20B,
            {"quantization_config": {"quant_method": "aqlm"}},
            ("quant_method", "aqlm", "quantization_config"),
        ),
        (GPT_OSS_20B, {"swiglu_limit": 5.0}, ("swiglu_limit", 5, 7.0)),
        (GPT_OSS_20B, {"swiglu_alpha": 1.0}, ("swiglu_alpha", 1, 1.702)),
        (PHI_3_5_MOE, {"num_experts_per_tok": 3}, ("num_experts_per_tok", 3, 2)),
        (
            PHI_3_5_MOE,
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            ("yarn", "rope_scaling"),
        ),
        (
            PHI_3_5_MOE,
            {"rope_scaling": {**PHI_3_5_MOE["rope_scaling"], "long_mscale": 2.0}},
            ("short_mscale", 1.24316, "long_mscale", 2, "rope_scaling"),
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        read(tmp_path, config, **changes)


def test_a_longrope_of_phi_3_5_moe_states_its_factors(tmp_path: Path) -> None:
    rope = {**PHI_3_5_MOE["rope_scaling"], "short_mscale": None}
    with pytest.raises(ConfigError, match=naming("rope_scaling", "short_mscale")):
        read(tmp_path, PHI_3_5_MOE, rope_scaling=rope)
