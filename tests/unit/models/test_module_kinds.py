"""The kind of every linear layer of every family, by its name in adapters alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.rank_limits import ModuleKind, kind_of
from loraplex.models.registry import read_config
from loraplex.models.spec import (
    DOWN,
    LATENT_INPUT,
    LATENT_OUTPUT,
    LAYER_INPUT_GATE,
    LAYER_INPUT_OUT,
    LAYER_INPUTS,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    UP,
)
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.convolution import CONV_IN, CONV_OUT
from loraplex.models.specs.delta import DELTA_GATES, DELTA_IN, DELTA_OUT
from loraplex.models.specs.latent import LATENT_DOWN, LATENT_HEADS, LATENT_OUT, LATENT_QUERY
from loraplex.models.specs.ssm import SSM_INPUT, SSM_OUTPUT
from support.families.case import LLAMA_LINEARS
from support.families.published import MODELS
from support.families.real_rest import CONFIGS

KINDS = {
    QKV: ModuleKind.ATTENTION,
    OUTPUT: ModuleKind.ATTENTION,
    DELTA_IN: ModuleKind.ATTENTION,
    DELTA_GATES: ModuleKind.ATTENTION,
    DELTA_OUT: ModuleKind.ATTENTION,
    SSM_INPUT: ModuleKind.ATTENTION,
    SSM_OUTPUT: ModuleKind.ATTENTION,
    CONV_IN: ModuleKind.ATTENTION,
    CONV_OUT: ModuleKind.ATTENTION,
    LATENT_DOWN: ModuleKind.ATTENTION,
    LATENT_QUERY: ModuleKind.ATTENTION,
    LATENT_HEADS: ModuleKind.ATTENTION,
    LATENT_OUT: ModuleKind.ATTENTION,
    UP: ModuleKind.MLP,
    DOWN: ModuleKind.MLP,
    LATENT_INPUT: ModuleKind.MLP,
    LATENT_OUTPUT: ModuleKind.MLP,
    LAYER_INPUTS: ModuleKind.MLP,
    LAYER_INPUT_GATE: ModuleKind.MLP,
    LAYER_INPUT_OUT: ModuleKind.MLP,
    ROUTER: ModuleKind.ROUTER,
    SHARED_UP: ModuleKind.SHARED_EXPERT,
    SHARED_DOWN: ModuleKind.SHARED_EXPERT,
    SHARED_GATE: ModuleKind.SHARED_EXPERT,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
CONFIG_FILES: dict[str, Mapping[str, Any]] = {
    **{name: model.config for name, model in MODELS.items()},
    **CONFIGS,
    "mixtral": MIXTRAL,
}


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_every_linear_layer_has_its_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_FILES[name]), encoding="utf-8")
    found = {
        (group, module): kind_of(module)
        for layer in read_config(tmp_path).layers
        for group, linears in layer.linears.items()
        for module in linears.modules
    }
    experts = {module for layer in read_config(tmp_path).layers for module in layer.num_experts}
    kinds = {(group, module): KINDS[group] for group, module in found}
    kinds |= {place: ModuleKind.EXPERTS for place in found if place[1] in experts}
    # A dense part in the place of a shared expert.
    kinds |= {place: ModuleKind.MLP for place in found if place[1] in LLAMA_LINEARS[4:]}
    assert found == kinds


@pytest.mark.parametrize("module", ["c_attn", "attn.c_attn", "attn.c_proj", "out_proj", "wo"])
def test_names_of_attention(module: str) -> None:
    assert kind_of(module) is ModuleKind.ATTENTION


@pytest.mark.parametrize("module", ["mlp.c_fc", "mlp.c_proj", "fc1", "fc_in", "gate_up_proj"])
def test_names_of_dense_parts(module: str) -> None:
    assert kind_of(module) is ModuleKind.MLP
