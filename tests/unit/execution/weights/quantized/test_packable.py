"""Stored weights in the forms of kernels: the same numbers, whatever the format and the parts."""

import dataclasses
from typing import Any

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.quantized.four_bit_floats import e2m1
from loraplex.execution.weights.quantized.packable import (
    in_super_blocks,
    packable,
    stacked_experts,
)
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.kernels.quantization import (
    QuantizedWeight,
    ScaleLevels,
    SuperBlockWeight,
    largest_entry,
)

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    ]
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(5)


def stored(
    bits: int = 4,
    size: int = 32,
    num_outputs: int = 6,
    num_inputs: int = 96,
    **parts: torch.Tensor | bool,
) -> StoredWeight:
    """Random codes and scales. zeros, offsets: True for random ones."""
    groups = (num_outputs, -(-num_inputs // size))
    if parts.get("zeros") is True:
        parts["zeros"] = torch.randint(1 << bits, groups, dtype=torch.uint8)
    if parts.get("offsets") is True:
        parts["offsets"] = torch.randn(groups)
    codes = torch.randint(1 << bits, (num_outputs, num_inputs)).to(torch.uint8)
    scales = torch.rand(groups) + 0.1
    return StoredWeight(codes=codes, scales=scales, group_size=size, bits=bits, **parts)


def packed(*parts: StoredWeight, num_blocks: int = 1) -> QuantizedWeight:
    found = packable(parts, num_blocks)
    assert found is not None
    assert found.dequantized().shape == (sum(len(p.codes) for p in parts), parts[0].shape[-1])
    return found


def assert_same(found: QuantizedWeight, *parts: StoredWeight, error: float = 2e-6) -> None:
    wanted = torch.cat([part.decoded() for part in parts])
    assert (found.dequantized() - wanted).abs().max() <= error * wanted.abs().max()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("part", ["zeros", "offsets", None])
def test_integers(bits: int, part: str | None) -> None:
    weight = stored(bits, **{part: True} if part else {})
    found = packed(weight)
    assert found.precision == (WeightPrecision.INT4 if bits <= 4 else WeightPrecision.INT8)
    assert_same(found, weight)


def test_symmetric_weights_have_no_offsets() -> None:
    middle = torch.full((6, 3), 8, dtype=torch.uint8)
    assert packed(stored(zeros=middle)).offsets is None
    assert packed(stored(zeros=middle - 1)).offsets is not None


def test_signed_bytes_stay_what_they_are() -> None:
    codes = torch.randint(-128, 128, (4, 40), dtype=torch.int8)
    weight = StoredWeight(codes=codes, scales=torch.rand(4, 1), group_size=40, bits=8)
    found = packed(weight)
    assert torch.equal(found.values, codes)
    assert found.group_size == 512
    assert torch.equal(found.dequantized(), weight.decoded())


@pytest.mark.parametrize(
    ("table", "wanted"),
    [(e2m1(), [0, 1, 2, 3, 4, 6, 8, 12]), (torch.arange(-8.0, 8.0) * 7, range(-56, 0, 7))],
)
def test_tables_of_whole_numbers_are_exact(table: torch.Tensor, wanted: object) -> None:
    weight = stored(table=table)
    found = packed(weight)
    assert found.table is not None
    small = list(wanted)
    assert [entry * small[1] for entry in found.table[:8]] == [
        entry * found.table[1] for entry in small
    ]
    assert_same(found, weight, error=1e-6)


def test_a_table_of_fractions_is_nearly_exact() -> None:
    weight = stored(size=64, num_inputs=128, table=NF4)
    found = packed(weight)
    assert found.table is not None
    assert max(map(abs, found.table)) <= largest_entry(64)
    assert_same(found, weight, error=4.6e-4)
    assert packable([weight], 1, is_exact=True) is None
    assert packable([stored(table=e2m1())], 1, is_exact=True) is not None


@pytest.mark.parametrize(
    ("size", "num_inputs", "num_blocks", "wanted"),
    [(32, 96, 1, 32), (128, 256, 2, 128), (128, 256, 4, 64), (48, 96, 1, 16), (1024, 4096, 1, 512)],
)
def test_groups_are_those_of_kernels(
    size: int, num_inputs: int, num_blocks: int, wanted: int
) -> None:
    weight = stored(size=size, num_inputs=num_inputs, zeros=True)
    found = packed(weight, num_blocks=num_blocks)
    assert found.group_size == wanted
    assert_same(found, weight)


def test_what_no_kernel_multiplies() -> None:
    ordered = torch.arange(96) % 3
    assert packable([stored(groups_of_inputs=ordered)], 1) is None
    assert packable([stored(size=24)], 1) is None
    assert packable([stored(size=8)], 1) is None
    floats = torch.randn(4, 32).to(torch.float8_e4m3fn)
    weight = StoredWeight(codes=floats, scales=torch.rand(4, 1), group_size=32, bits=8)
    assert packable([weight], 1) is None
    assert packable([stored(), stored(table=NF4)], 1) is None
    assert packable([stored(table=e2m1()), stored(table=NF4)], 1) is None


def test_parts_of_other_widths_and_groups() -> None:
    parts = stored(4, 32, zeros=True), stored(6, 16), stored(8, 96, num_outputs=3, offsets=True)
    found = packed(*parts)
    assert (found.precision, found.group_size) == (WeightPrecision.INT8, 16)
    assert_same(found, *parts)


def test_a_small_table_next_to_other_codes_becomes_bytes() -> None:
    parts = stored(table=e2m1()), stored(5, 16, offsets=True), stored(zeros=True)
    found = packed(*parts)
    assert (found.precision, found.table) == (WeightPrecision.INT8, None)
    assert_same(found, *parts)


def test_experts_are_stacked() -> None:
    experts = [stored(zeros=True), stored(size=16), stored()]
    found = stacked_experts([packed(expert) for expert in experts])
    wanted = torch.stack([expert.decoded() for expert in experts])
    assert torch.allclose(found.dequantized(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("first", "end"), [(0, 96), (32, 64), (48, 96), (16, 80), (0, 90)])
@pytest.mark.parametrize("size", [32, 96])
def test_inputs_of_a_weight(first: int, end: int, size: int) -> None:
    weight = stored(5, size, zeros=True, offsets=True)
    own = weight.inputs(first, end)
    assert torch.equal(own.decoded(), weight.decoded()[:, first:end])
    ordered = dataclasses.replace(
        weight, groups_of_inputs=torch.randint(weight.scales.shape[1], (96,))
    )
    assert torch.equal(ordered.inputs(first, end).decoded(), ordered.decoded()[:, first:end])


def test_rows_of_a_weight() -> None:
    weight = stored(zeros=True)
    own = weight.rows(lambda tensor: tensor[[4, 1]])
    assert torch.equal(own.decoded(), weight.decoded()[[4, 1]])


def in_levels(bits: int, size: int, zero: int = 0, *, has_minima: bool = False) -> StoredWeight:
    """Random weight [6, 512] of super-blocks."""
    groups, super_blocks = (6, 512 // size), (6, 2)
    most = 32 if zero else 64
    levels = ScaleLevels(
        torch.randint(-most if zero else 0, most, groups, dtype=torch.int8),
        torch.rand(super_blocks) + 0.1,
        torch.randint(64, groups, dtype=torch.int8) if has_minima else None,
        torch.rand(super_blocks) if has_minima else None,
    )
    scales = levels.group_scales()
    return StoredWeight(
        codes=torch.randint(1 << bits, (6, 512)).to(torch.uint8),
        scales=scales,
        group_size=size,
        bits=bits,
        zeros=torch.full_like(scales, zero, dtype=torch.uint8) if zero else None,
        offsets=levels.group_offsets(),
        levels=levels,
    )


Q2_K = {"bits": 2, "size": 16, "has_minima": True}
Q3_K = {"bits": 3, "size": 16, "zero": 4}
Q4_K = {"bits": 4, "size": 32, "has_minima": True}
Q5_K = {"bits": 5, "size": 32, "has_minima": True}
Q6_K = {"bits": 6, "size": 16, "zero": 32}


@pytest.mark.parametrize(
    ("kinds", "bits", "size", "has_minima"),
    [
        ([Q2_K], 4, 16, True),
        ([Q3_K], 4, 16, True),
        ([Q4_K], 4, 32, True),
        ([Q5_K], 6, 32, True),
        ([Q6_K], 6, 16, False),
        ([Q4_K, Q4_K, Q6_K], 6, 16, True),
        ([Q3_K, Q5_K], 6, 16, True),
    ],
)
def test_super_blocks_keep_both_levels(
    kinds: list[dict[str, Any]], bits: int, size: int, *, has_minima: bool
) -> None:
    parts = [in_levels(**kind) for kind in kinds]
    found = in_super_blocks(parts, 2)
    assert found is not None
    assert (found.bits, found.group_size) == (bits, size)
    assert (found.levels.minima is not None) == has_minima
    assert (int(found.values.min()), int(found.values.max())) >= ((0, 0) if bits == 4 else (-32, 0))
    wanted = torch.cat([part.decoded() for part in parts])
    assert torch.allclose(found.dequantized(), wanted, rtol=1e-5, atol=1e-4)


def test_what_has_no_whole_super_blocks() -> None:
    weight = in_levels(**Q4_K)
    assert in_super_blocks([weight], 4) is None
    assert in_super_blocks([weight, stored(num_inputs=512)], 1) is None
    assert in_super_blocks([weight.inputs(0, 128)], 1) is None


def test_inputs_and_rows_of_super_blocks() -> None:
    weight = in_levels(**Q4_K)
    own = weight.inputs(256, 512).rows(lambda tensor: tensor[1:3])
    found = in_super_blocks([own], 1)
    assert found is not None
    assert torch.equal(found.dequantized(), weight.decoded()[1:3, 256:])


def test_experts_of_super_blocks_are_stacked() -> None:
    experts = [in_levels(**Q4_K), in_levels(**Q6_K)]
    found = [in_super_blocks([expert], 1) for expert in experts]
    stacked = stacked_experts([weight for weight in found if weight is not None])
    assert isinstance(stacked, SuperBlockWeight)
    wanted = torch.stack([expert.decoded() for expert in experts])
    assert torch.allclose(stacked.dequantized(), wanted, rtol=1e-5, atol=1e-4)
    assert stacked_experts([found[0], packed(stored(num_inputs=512))]) is None


def test_inputs_are_rounded_only_where_all_parts_have_it() -> None:
    rounded = dataclasses.replace(stored(8), has_byte_inputs=True)
    assert packed(rounded, rounded).has_byte_inputs
    assert not packed(rounded, stored(8)).has_byte_inputs
    exact = packable([rounded], 1, is_exact=True)
    assert exact is not None
    assert not exact.has_byte_inputs
