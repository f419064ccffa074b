"""Llama 4: what is read of config.json, what is refused, and rows that are cut into chunks."""

from typing import Any

import pytest
import torch

from loraplex.core.cache import Blocks, Chunk
from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.plan import CacheGroupId
from loraplex.execution.sizing.kv import wanted_model_len, windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.ops import AttentionRules, AttentionShape, RowLayout
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.cache_groups import cache_groups
from loraplex.models.config_fields import ConfigFields
from loraplex.models.mixers.attention import AttentionKind, rows_in_chunks
from loraplex.models.registry import ARCHITECTURES
from loraplex.models.rope import RotaryTable
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from support.families.published_recent_experts import MODELS
from support.naming import naming


def read(**changes: Any) -> ModelSpec:
    fields = {**MODELS["llama-4-scout"].config["text_config"], **changes}
    return ARCHITECTURES["Llama4ForCausalLM"](ConfigFields(fields, "config.json"))


def test_layers_rotate_in_chunks_or_see_all() -> None:
    spec = read()
    first, *_, last = spec.mixers_of(AttentionSpec)
    assert (first.chunk, last.chunk) == (8192, None)
    assert first.q_norm is not None
    assert first.query_rope is None
    assert last.q_norm is None
    assert last.query_rope is not None
    groups = cache_groups(spec, 32_768)
    assert [group.spec for group in groups] == [Blocks(), Chunk(8192)]
    assert [len(group.layers) for group in groups] == [12, 36]
    (all_layers,) = cache_groups(spec, 8192)
    assert all_layers.spec == Blocks()


@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({}, True),
        ({"attn_temperature_tuning": 4}, True),
        ({"attn_temperature_tuning": True}, True),
        ({"attn_temperature_tuning": False}, False),
        ({"attn_temperature_tuning": 0}, False),
    ],
)
def test_queries_without_rotation_grow(changes: dict[str, Any], is_on: bool) -> None:
    *_, last = read(**changes).mixers_of(AttentionSpec)
    assert (last.query_rope is not None) == is_on


def test_growth_counts_from_one() -> None:
    """The formula of transformers: ln(1 + floor((position + 1) / 8192)) * 0.1 + 1."""
    *_, last = read().mixers_of(AttentionSpec)
    assert last.query_rope is not None
    table = RotaryTable(
        last.query_rope,
        128,
        max_position_embeddings=1,
        max_model_len=16_384,
        device=torch.device("cpu"),
    )
    found = table.cos[[0, 8190, 8191, 16_382, 16_383], 0].tolist()
    assert found == pytest.approx([1, 1, 1.0693147, 1.0693147, 1.1098612])


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_experts_per_tok": 2}, UnsupportedModelError, ("num_experts_per_tok", 2)),
        ({"moe_layers": [1, 48]}, ConfigError, ("moe_layers", 48)),
        ({"layer_types": ["chunked_attention"]}, ConfigError, ("layer_types", 1, 48)),
        ({"attn_temperature_tuning": "yes"}, ConfigError, ("attn_temperature_tuning",)),
    ],
)
def test_refused_fields(
    changes: dict[str, Any], error: type[Exception], named: tuple[object, ...]
) -> None:
    with pytest.raises(error, match=naming(*named)):
        read(**changes)


@pytest.mark.parametrize(
    ("name", "value"), [("max_attention_window_size", (512,)), ("sink_token_length", 512)]
)
def test_windows_of_an_operator_are_refused_in_chunks(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=naming(512, 8192)) as raised:
        windowed(RunnerSettings(**{name: value}), read())
    assert raised.value.param == name


def test_a_gpu_serves_one_chunk() -> None:
    settings = RunnerSettings(device="cuda", max_model_len=8193)
    with pytest.raises(ConfigError, match=naming(8193, 8192, "GPU")):
        wanted_model_len(settings, windowed(settings, read()))
    settings = RunnerSettings(max_model_len=8193)
    assert wanted_model_len(settings, windowed(settings, read())) == 8193


def test_rows_are_cut_where_chunks_begin() -> None:
    """A prompt's end over a border, a token of a later chunk, and a row before the first border."""
    tables = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, -1, -1, -1, -1]])
    rows = RowLayout([0, 5, 6, 8], [10, 17, 3], tables)
    cut = rows_in_chunks(rows, 8, 4)
    assert cut.query_start_loc == [0, 3, 5, 6, 8]
    assert cut.seq_lens == [8, 2, 1, 3]
    needed = [
        row[: -(-seq_len // 4)]
        for row, seq_len in zip(cut.block_tables.tolist(), cut.seq_lens, strict=True)
    ]
    assert needed == [[10, 11], [12], [24], [30]]


def test_blocks_must_divide_chunks() -> None:
    kind = AttentionKind(
        CacheGroupId(0), AttentionShape(1, 1, 8, 48), AttentionRules(scale=1.0), chunk=64
    )
    with pytest.raises(ConfigError, match=naming(64, 48)) as raised:
        kind.planner(ReferenceKernels(torch.device("cpu")), torch.device("cpu"))
    assert raised.value.param == "block_size"
