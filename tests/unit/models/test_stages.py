"""Ranges of layers of pipeline stages, and what else each stage has."""

import dataclasses

import pytest
import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS, LoraTarget
from loraplex.core.errors import AdapterMismatchError, ConfigError
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight
from loraplex.execution.adapters.rank_share import AdapterCutter
from loraplex.models.cache_groups import cache_groups
from loraplex.models.linear_group import TensorShard
from loraplex.models.parameters import checkpoint_shapes, linear_places
from loraplex.models.sharding import shard
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.stages import ONLY_STAGE, PipelineStage, stage
from support.naming import naming
from support.tiny_decoder import tiny_spec
from support.toy_encoder import encoder_decoder_spec

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
"""Sizes of a model of 1.1 billion weights, whose output layer is as large as 1.5 layers."""


def stages(spec: ModelSpec, size: int) -> list[ModelSpec]:
    return [stage(spec, PipelineStage(index, size)) for index in range(size)]


def test_a_model_with_an_encoder_has_one_stage() -> None:
    spec = encoder_decoder_spec(100)
    assert stage(spec, ONLY_STAGE) == spec
    with pytest.raises(ConfigError, match=naming("pipeline_parallel_size", 2)):
        stage(spec, PipelineStage(0, 2))


def test_stages_read_about_equally_many_weights() -> None:
    spec = tiny_spec(**LARGE)
    assert [one.num_layers for one in stages(spec, 2)] == [12, 10]
    assert [one.num_layers for one in stages(spec, 4)] == [6, 6, 6, 4]
    assert [one.first_layer for one in stages(spec, 4)] == [0, 6, 12, 18]
    whole = [layer for one in stages(spec, 3) for layer in one.layers]
    assert tuple(whole) == spec.layers
    assert [one.num_layers for one in stages(spec, 22)] == [1] * 22


def sharing(*distances: int) -> ModelSpec:
    """Return a model whose layer i reads the keys of the layer distances[i] before it."""
    spec = tiny_spec(num_hidden_layers=len(distances))
    return spec.map_mixers(
        AttentionSpec,
        lambda mixer, index: dataclasses.replace(mixer, kv_distance=distances[index]),
    )


def test_a_layer_is_in_the_stage_of_the_layer_whose_keys_it_reads() -> None:
    spec = sharing(0, 0, 0, 1, 2, 0)
    for size in (2, 3):
        assert not {3, 4} & {one.first_layer for one in stages(spec, size)}
    assert [one.num_layers for one in stages(spec, 4)] == [1, 1, 3, 1]
    with pytest.raises(ConfigError, match=naming("keys", "pipeline_parallel_size", 4, 5)):
        stage(spec, PipelineStage(0, 5))


def test_a_model_whose_layers_have_inputs_of_their_own_has_one_stage() -> None:
    spec = dataclasses.replace(tiny_spec(), layer_input_size=4)
    assert stage(spec, ONLY_STAGE) == spec
    with pytest.raises(ConfigError, match=naming("embedding", "pipeline_parallel_size", 2)):
        stage(spec, PipelineStage(0, 2))


def test_ranks_of_a_stage_have_the_same_layers() -> None:
    spec = tiny_spec(**LARGE)
    ranks = [shard(spec, TensorShard(rank, 2)) for rank in range(2)]
    for index in range(3):
        place = PipelineStage(index, 3)
        first, second = (stage(rank, place) for rank in ranks)
        assert (first.first_layer, first.num_layers) == (second.first_layer, second.num_layers)
        assert first.whole is spec


def test_one_stage_is_the_whole_model() -> None:
    spec = tiny_spec()
    assert stage(spec, ONLY_STAGE) is spec
    assert spec.is_first_stage
    assert spec.is_last_stage


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match=naming(2, 3, "pipeline_parallel_size")) as caught:
        stage(tiny_spec(), PipelineStage(0, 3))
    assert caught.value.param == "pipeline_parallel_size"


def test_only_the_ends_have_what_lies_outside_the_layers() -> None:
    spec = tiny_spec(num_hidden_layers=3)
    parts = stages(spec, 3)
    assert [one.is_first_stage for one in parts] == [True, False, False]
    assert [one.is_last_stage for one in parts] == [False, False, True]
    heads = [any(place.is_lm_head for place in linear_places(one)) for one in parts]
    assert heads == [False, False, True]
    names = [{n for n in checkpoint_shapes(one) if ".layers." in n} for one in parts]
    assert set.union(*names) == {n for n in checkpoint_shapes(spec) if ".layers." in n}
    assert all(".layers.1." in name for name in names[1])


def test_every_stage_has_all_cache_groups() -> None:
    """A plan has a block table for each of them."""
    spec = tiny_spec(num_hidden_layers=4)
    windows = (None, None, 8, None)
    layers = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))
        for layer, window in zip(spec.layers, windows, strict=True)
    )
    spec = dataclasses.replace(spec, layers=layers)
    groups = [[group.layers for group in cache_groups(one, 64)] for one in stages(spec, 4)]
    assert groups == [[(0,), ()], [(0,), ()], [(), (0,)], [(0,), ()]]


def test_a_stage_keeps_its_layers_of_an_adapter() -> None:
    spec = tiny_spec(num_hidden_layers=3)
    layers = [OUTSIDE_LAYERS, 0, 1, 2]
    modules = [LM_HEAD, "q_proj", "q_proj", "q_proj"]
    weights = tuple(
        HostWeight(LoraTarget(layer, module, 1, 32, 32), torch.ones(1, 32), torch.ones(32, 1), 1.0)
        for layer, module in zip(layers, modules, strict=True)
    )
    cutters = [AdapterCutter(one, None) for one in stages(spec, 2)]
    kept = [cutter.cut(HostAdapter("a", weights)).weights for cutter in cutters]
    assert [[one.target.layer for one in weights] for weights in kept] == [[0, 1], [-1, 0]]
    odd = dataclasses.replace(weights[0], target=LoraTarget(3, "q_proj", 1, 32, 32))
    for cutter in cutters:
        with pytest.raises(AdapterMismatchError, match=naming(3)):
            cutter.cut(HostAdapter("b", (odd,)))
