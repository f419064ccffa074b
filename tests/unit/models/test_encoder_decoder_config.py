"""Biases by distance, and names and fields of encoder-decoder checkpoints."""

from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.execution.sizing.capacity import choose_dtype
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.models.config_fields import ConfigFields
from loraplex.models.encoder_decoder_config import read_first_ids
from loraplex.models.families import bart, t5
from loraplex.models.mixers.attention import _by_distance
from loraplex.models.specs.attention import AttentionSpec, PositionBias
from support.naming import naming

LONGEST = 4096


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (12, 20), (64, 300)])
def test_buckets_are_those_of_transformers(
    num_buckets: int, max_distance: int, is_causal: bool
) -> None:
    spec = AttentionSpec(
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        rope=None,
        is_causal=is_causal,
        position_bias=PositionBias("table", num_buckets, max_distance),
    )
    (by_distance,) = _by_distance(spec, torch.arange(num_buckets).float().unsqueeze(1))
    distances = torch.arange(-LONGEST, LONGEST + 1)
    expected = T5Attention._relative_position_bucket(
        distances, not is_causal, num_buckets, max_distance
    )
    found = by_distance[distances.clamp(-max_distance, max_distance) + max_distance]
    assert torch.equal(found.long(), expected)


def test_copies_of_the_embedding_are_left_out() -> None:
    """Files of older versions have the embedding three times."""
    assert t5.NAMES.canonical("shared.weight") == "decoder.embed_tokens.weight"
    assert t5.NAMES.canonical("encoder.embed_tokens.weight") is None
    assert t5.NAMES.canonical("decoder.embed_tokens.weight") is None
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert t5.NAMES.canonical(name) is None
    assert bart.NAMES.canonical("model.shared.weight") == "model.decoder.embed_tokens.weight"
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.version"):
        assert bart.NAMES.canonical(name) is None


def test_names_of_layers_stay() -> None:
    for name in ("encoder.block.0.layer.0.layer_norm.weight", "lm_head.weight"):
        assert t5.NAMES.canonical(name) == name
    for name in ("model.encoder.layers.0.fc1.weight", "final_logits_bias"):
        assert bart.NAMES.canonical(name) == name


def fields(**values: Any) -> ConfigFields:
    return ConfigFields({"vocab_size": 100, **values}, "config.json")


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({}, 512**-0.5),
        ({"tie_word_embeddings": True}, 512**-0.5),
        ({"tie_word_embeddings": False}, 1.0),
        # As transformers 5 writes it.
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, 1.0),
    ],
)
def test_the_scale_of_t5s_logits(values: dict[str, bool], factor: float) -> None:
    assert t5.read_config(fields(**values)).logits_factor == factor


def test_scales_of_mt5_and_umt5() -> None:
    assert t5.read_config_mt5(fields(tie_word_embeddings=True)).logits_factor == 1.0
    assert t5.read_config_umt5(fields(tie_word_embeddings=False)).logits_factor == 512**-0.5


def test_float16_is_refused_for_t5() -> None:
    stored, other = (t5.read_config(fields(torch_dtype=dtype)) for dtype in ("float16", "float32"))
    for spec, dtype in ((stored, "auto"), (other, "float16")):
        with pytest.raises(ConfigError, match="dtype float16 is not supported in T5"):
            choose_dtype(RunnerSettings(dtype=dtype), spec)
    assert choose_dtype(RunnerSettings(dtype="bfloat16"), stored) == torch.bfloat16


@pytest.mark.parametrize("form", ["gelu", "gated-tanh"])
def test_an_unknown_feed_forward_part_is_refused(form: str) -> None:
    with pytest.raises(UnsupportedModelError, match=form):
        t5.read_config(fields(feed_forward_proj=form))


@pytest.mark.parametrize(("buckets", "distance"), [(2, 128), (32, 16), (32, 1 << 30)])
def test_buckets_that_cannot_be_computed_are_refused(buckets: int, distance: int) -> None:
    with pytest.raises(ConfigError, match=f"got {buckets} and {distance}"):
        t5.read_config(
            fields(relative_attention_num_buckets=buckets, relative_attention_max_distance=distance)
        )


def test_first_tokens() -> None:
    read = bart.read_config(fields(forced_bos_token_id=0))
    assert read.encoder is not None
    assert read.encoder.first_ids == (2, 0)
    marian = bart.read_config_marian(fields(pad_token_id=99, decoder_start_token_id=99))
    assert marian.encoder is not None
    assert marian.encoder.first_ids == (99,)
    assert marian.encoder.never_ids == (99,)


def test_apart_embeddings_of_marian_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="share_encoder_decoder_embeddings"):
        bart.read_config_marian(fields(share_encoder_decoder_embeddings=False))


@pytest.mark.parametrize("name", ["decoder_start_token_id", "forced_bos_token_id"])
@pytest.mark.parametrize("token_id", [-5, 32])
def test_first_tokens_are_in_the_vocabulary(name: str, token_id: int) -> None:
    fields = ConfigFields({name: token_id}, "config.json")
    with pytest.raises(ConfigError, match=naming("config.json", name, 32, token_id)):
        read_first_ids(fields, 32, 0)
    assert read_first_ids(ConfigFields({name: 31}, "config.json"), 32, 0)[-1] == 31
