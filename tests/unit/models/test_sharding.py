"""Which slices of weights and adapters a rank has: the rules of TensorRT-LLM's column and row."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import ConfigError
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.execution.adapters.rank_share import AdapterCutter
from loraplex.models.linear_group import LinearGroup, OutputSpan, TensorShard
from loraplex.models.registry import read_config
from loraplex.models.sharding import adapter_share, shard
from loraplex.models.spec import DOWN, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from support.families import every
from support.naming import naming

CASES = every.CASES


def spec_of(name: str, folder: Path) -> ModelSpec:
    CASES[name].save(folder)
    return read_config(folder)


def group_of(**outputs: int) -> LinearGroup:
    return LinearGroup(
        paths=tuple(outputs), outputs=outputs, in_features=64, has_bias=False, is_row=False
    )


def test_outputs_of_a_fused_layer_are_cut_part_by_part() -> None:
    """One range of a fused q, k and v would lose the values."""
    fused = group_of(qkv_proj=24)
    part = fused.split(outputs=[OutputSpan(4, 8), OutputSpan(14, 16), OutputSpan(20, 22)]).part
    assert part is not None
    assert part.outputs == {"qkv_proj": (OutputSpan(4, 8), OutputSpan(14, 16), OutputSpan(20, 22))}
    apart = group_of(q=16, k=4, v=4).split(
        outputs=[OutputSpan(8, 16), OutputSpan(18, 20), OutputSpan(22, 24)]
    )
    assert apart.outputs == {"q": 8, "k": 2, "v": 2}
    assert apart.part is not None
    assert apart.part.outputs == {
        "q": (OutputSpan(8, 16),),
        "k": (OutputSpan(2, 4),),
        "v": (OutputSpan(2, 4),),
    }


def test_parts_of_a_fused_layer_are_named_by_the_group_itself() -> None:
    """Parts follow from the group alone, not from its name or its place in a layer."""
    group = dataclasses.replace(
        group_of(in_proj_qkv=20, in_proj_z=8), parts={"q": 4, "k": 4, "v": 12, "z": 8}
    )
    assert group.fused_modules == {"in_proj_qkv": {"q": 4, "k": 4, "v": 12}}
    assert list(group.part_spans) == [
        OutputSpan(0, 4),
        OutputSpan(4, 8),
        OutputSpan(8, 20),
        OutputSpan(20, 28),
    ]
    half = group.split(
        outputs=[OutputSpan(2, 4), OutputSpan(6, 8), OutputSpan(14, 20), OutputSpan(24, 28)]
    )
    assert half.outputs == {"in_proj_qkv": 10, "in_proj_z": 4}
    assert half.fused_modules == {"in_proj_qkv": {"q": 2, "k": 2, "v": 6}}
    assert half.split(inputs=OutputSpan(0, 8)).parts == half.parts, "all outputs"
    assert group_of(q=4, k=4).fused_modules == {}


@pytest.mark.parametrize(
    ("in_features", "blocks"),
    [(4096, 4), (5632, 4), (128, 4), (64, 2), (96, 1), (48, 4), (50, 2), (7, 1)],
)
def test_blocks_depend_on_the_model_alone(in_features: int, blocks: int) -> None:
    group = dataclasses.replace(group_of(o=8), in_features=in_features, is_row=True)
    assert group.input_blocks == blocks
    for size in (2, 4):
        if in_features % size == 0:
            shares = [
                group.split(
                    inputs=OutputSpan(in_features * r // size, in_features * (r + 1) // size)
                )
                for r in range(size)
            ]
            assert {share.input_blocks for share in shares} == {max(1, blocks // size)}
    assert group_of(o=8).input_blocks == 0, "a column layer has none"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["gemma2", "phi3", "internlm2", "mixtral", "qwen2-moe", "falcon"])
def test_ranks_have_every_weight_once(name: str, size: int, tmp_path: Path) -> None:
    """KV heads that several ranks need are the exception: each of these has a copy."""
    spec = spec_of(name, tmp_path)
    try:
        shards = [shard(spec, TensorShard(rank, size)) for rank in range(size)]
    except ConfigError:
        pytest.skip("so many ranks cannot share this model")
    for index, layer in enumerate(spec.layers):
        attention = layer.mixer
        for group_name, group in layer.linears.items():
            seen = torch.zeros(sum(group.outputs.values()), group.in_features, dtype=torch.int64)
            for part in (one.layers[index].linears[group_name].part for one in shards):
                outputs = range(len(seen)) if part is None else _outputs(part.outputs, group)
                inputs = OutputSpan(0, group.in_features) if part is None else part.inputs
                seen[list(outputs), inputs.first : inputs.end] += 1
            is_whole = size == 1 or group_name not in (QKV, OUTPUT, UP, DOWN)
            if group_name == QKV and attention.num_kv_heads < size:
                assert int(seen.min()) == 1
                assert int(seen.max()) == size // attention.num_kv_heads
            elif not (is_whole or group_name.startswith("shared")):
                assert bool((seen == 1).all()), group_name


def _outputs(spans: dict[str, tuple[OutputSpan, ...]], group: LinearGroup) -> list[int]:
    return [
        first + output
        for first, module in zip(group.first_outputs, group.modules, strict=True)
        for span in spans[module]
        for output in range(*span)
    ]


@pytest.mark.parametrize(
    ("name", "size", "named"),
    [
        ("gemma", 3, (4, 3, "tensor_parallel_size")),
        ("bloom", 4, (6, 4, "tensor_parallel_size")),
        ("olmo2", 4, (2, 4, "tensor_parallel_size")),
        ("gemma", 8, (4, 8, "tensor_parallel_size")),
    ],
)
def test_a_model_that_cannot_be_shared(
    name: str, size: int, named: tuple[object, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)) as raised:
        shard(spec_of(name, tmp_path), TensorShard(0, size))
    assert raised.value.param == "tensor_parallel_size"
    assert re.search(naming(4, "tensor_parallel_size", 2), raised.value.message)


def test_column_layers_keep_a_and_row_layers_keep_b(tmp_path: Path) -> None:
    """A column layer has A whole and its rows of B; a row layer columns of A, and B whole."""
    spec = spec_of("gemma", tmp_path)
    weights = [
        HostWeight(LoraTarget(0, module, 3, *shape), torch.randn(3, shape[0]), b, 1.0)
        for module, shape in spec.layers[0].module_shapes.items()
        for b in (torch.randn(shape[1], 3),)
    ]
    adapter = HostAdapter("a", tuple(weights))
    for size in (2, 4):
        cut = [cutter(spec, rank, size).cut(adapter) for rank in range(size)]
        for index, whole in enumerate(weights):
            parts = [one.weights[index] for one in cut]
            if whole.target.module in ("o_proj", "down_proj"):
                assert torch.equal(torch.cat([part.a for part in parts], 1), whole.a)
                assert all(torch.equal(part.b, whole.b) for part in parts)
                continue
            assert all(torch.equal(part.a, whole.a) for part in parts)
            rows = [part.b for part in parts]
            if whole.target.module in ("k_proj", "v_proj"):
                copies = max(1, size // spec.layers[0].mixer.num_kv_heads)
                assert all(
                    torch.equal(rows[rank], rows[rank - rank % copies]) for rank in range(size)
                )
                rows = rows[::copies]
            assert torch.equal(torch.cat(rows), whole.b)


def test_vectors_are_cut_like_the_outputs_whatever_their_pieces(tmp_path: Path) -> None:
    spec = spec_of("gemma", tmp_path)
    size = spec.layers[1].module_shapes["up_proj"][1]
    values = torch.arange(float(size))
    pieces = [OutputSpan(first, min(first + 5, size)) for first in range(0, size, 5)]
    parts = [
        HostPart(_vector_target("up_proj", piece), values[piece.first : piece.end])
        for piece in pieces
    ]
    down = torch.arange(float(spec.hidden_size))
    parts.append(HostPart(_vector_target("down_proj", OutputSpan(0, spec.hidden_size)), down))
    cut = [
        cutter(spec, rank, 2, largest_piece=7).cut(HostAdapter("a", (), tuple(parts)))
        for rank in (0, 1)
    ]
    for rank, adapter in enumerate(cut):
        of_up = [part for part in adapter.parts if part.target.module == "up_proj"]
        assert torch.equal(
            torch.cat([part.values for part in of_up]),
            values[rank * size // 2 : (rank + 1) * size // 2],
        )
        assert all(part.target.num_elements <= 7 for part in of_up)
        firsts = itertools.accumulate((len(part.values) for part in of_up), initial=0)
        assert [part.target.first for part in of_up] == list(firsts)[:-1]
        of_down = [part.values for part in adapter.parts if part.target.module == "down_proj"]
        assert torch.equal(torch.cat(of_down), down)
    assert [p.target for p in cut[0].parts] == [p.target for p in cut[1].parts]


def _vector_target(module: str, piece: OutputSpan) -> LoraTarget:
    return LoraTarget(1, module, 1, 0, piece.size, TargetPart.SHIFT, piece.first)


def cutter(spec: ModelSpec, rank: int, size: int, largest_piece: int = 10_000) -> AdapterCutter:
    own = shard(spec, TensorShard(rank, size))
    share = adapter_share(own, largest_piece)
    assert share is not None
    return AdapterCutter(own, share)
