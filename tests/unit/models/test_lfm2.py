"""LFM2's configurations: which layers convolve, and the sizes of published models."""

import math
from typing import Any

import pytest

from loraplex.core.cache import Blocks
from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.cache_groups import cache_groups
from loraplex.models.config_fields import ConfigFields
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import ARCHITECTURES
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.convolution import ConvSpec

PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
"""LFM2-1.2B"""


def read(**changes: Any) -> ModelSpec:
    fields = PUBLISHED | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    return ARCHITECTURES[fields["architectures"][0]](ConfigFields(kept, "config.json"))


def test_a_published_model_has_its_size() -> None:
    spec = read()
    assert sum(map(math.prod, checkpoint_shapes(spec).values())) == 1_170_340_608
    attending = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert [index for index, own in enumerate(attending) if own] == [2, 5, 8, 10, 12, 14]
    assert spec.tie_word_embeddings


def test_layers_that_convolve_keep_their_newest_inputs() -> None:
    groups = cache_groups(read(), 4096)
    assert [group.spec for group in groups] == [Blocks(), Blocks(3, by_rows=True)]
    assert [len(group.layers) for group in groups] == [6, 10]
    # A window that no sequence outgrows is none.
    assert [group.spec for group in cache_groups(read(), 3)] == [Blocks(by_rows=True), Blocks()]


def test_fields_have_older_names() -> None:
    types = ["conv"] * 15 + ["full_attention"]
    spec = read(layer_types=types, tie_embedding=False, block_ff_dim=None, intermediate_size=1500)
    assert [type(layer.mixer) for layer in spec.layers] == [ConvSpec] * 15 + [AttentionSpec]
    assert not spec.tie_word_embeddings
    assert spec.layers[0].feed_forward is not None
    assert spec.layers[0].feed_forward.inner_size == 1024


def test_experts_are_in_all_layers_but_the_first() -> None:
    spec = read(architectures=["Lfm2MoeForCausalLM"], layer_types=["conv"] * 16)
    parts = [layer.feed_forward for layer in spec.layers]
    floors = [part.routing.sum_floor if part and part.routing else None for part in parts]
    assert floors == [None] * 2 + [1e-6] * 14


def test_what_is_not_computed_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer type 'sliding_attention'"):
        read(layer_types=["sliding_attention"] * 16)
    with pytest.raises(ConfigError, match="layer_types has 2 entries"):
        read(layer_types=["conv"] * 2)
