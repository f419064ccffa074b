"""Native products with weights in the forms of checkpoints: the bits of the torch reference.

On every instruction set, in every company of rows, in blocks, of experts, and from a program.
"""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import LIBRARY_FOLDER, load_library
from loraplex.kernels.native.linear import NativeLinear, NativeWeight
from loraplex.kernels.quantization import (
    SUPER_BLOCK_GROUPS,
    QuantizedWeight,
    largest_entry,
    quantized_linear,
    rounded_linear,
    super_block_linear,
)
from loraplex.kernels.routing import sort_routes
from support.naming import naming
from support.stored_weights import FORMS, SUPER_BLOCK_FORMS, stored_weight, super_block_weight
from unit.kernels.test_native_quantized_linear import dot_products, instruction_sets, make_kernel

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

GROUP_SIZES = [16, 32, 64, 128, 256, 512]
INT8, INT4 = WeightPrecision.INT8, WeightPrecision.INT4


@pytest.fixture(params=dot_products(), ids=lambda p: p[0] + ("" if p[1] else " without VNNI"))
def kernel(request: pytest.FixtureRequest) -> NativeLinear:
    instruction_set, with_vnni = request.param
    return make_kernel(instruction_set, 2, with_vnni)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_the_reference(
    kernel: NativeLinear, form: str, group_size: int, generator: torch.Generator
) -> None:
    """One group and several, a piece of inputs left over, and of bytes a short group at the end."""
    sizes = [(group_size, 5), (512 + group_size, 130), (3 * group_size, 17)]
    if form.startswith("int8"):
        sizes += [(37, 16), (520, 33), (1031, 129)]
    for in_features, out_features in sizes:
        weight = stored_weight(form, group_size, in_features, out_features, generator)
        bias = torch.randn(out_features, generator=generator)
        packed = kernel.pack(weight, bias)
        x = torch.randn(40, in_features, generator=generator)
        expected = quantized_linear(x, weight, bias)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 40):
            assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("group_size", SUPER_BLOCK_GROUPS)
@pytest.mark.parametrize("form", SUPER_BLOCK_FORMS)
def test_the_bits_of_super_blocks(
    kernel: NativeLinear, form: str, group_size: int, generator: torch.Generator
) -> None:
    """One super-block and several, a piece of inputs left over, and the largest sums."""
    for in_features, out_features in [(256, 5), (768, 130), (1024, 17)]:
        weight = super_block_weight(form, group_size, in_features, out_features, generator)
        weight.values[0], weight.levels.factors[0] = weight.values.max(), -128
        bias = torch.randn(out_features, generator=generator)
        packed = kernel.pack(weight, bias)
        x = torch.randn(530, in_features, generator=generator)
        x[0], x[1], x[2] = 1.0, -1.0, 0.0
        expected = super_block_linear(x, weight, bias)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 40, 200, 530):
            assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_format_whose_reader_rounds_inputs(
    kernel: NativeLinear, form: str, generator: torch.Generator
) -> None:
    weight = dataclasses.replace(stored_weight(form, 32, 544, 130, generator), has_byte_inputs=True)
    x = torch.randn(40, 544, generator=generator)
    expected = rounded_linear(x, weight, None)
    packed = kernel.pack(weight, None)
    for num_rows in (1, 5, 40):
        assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])


def test_inputs_that_are_no_numbers_stay_in_their_row(
    kernel: NativeLinear, generator: torch.Generator
) -> None:
    weight = super_block_weight("super6 minima", 16, 512, 20, generator)
    packed = kernel.pack(weight, None)
    x = torch.randn(6, 512, generator=generator)
    expected = kernel.apply(x, packed)
    x[2] *= 20.0
    x[4, 300] = torch.inf
    y = kernel.apply(x, packed)
    assert torch.equal(y[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])
    assert y[4].isnan().all()


def by_blocks(
    x: torch.Tensor, weight: QuantizedWeight, num_blocks: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference of a row layer: neighbouring blocks' products are added until one is left."""
    inputs = x.shape[1] // num_blocks
    groups = inputs // weight.group_size
    sums = []
    for block in range(num_blocks):
        of_inputs = slice(block * inputs, (block + 1) * inputs)
        of_groups = slice(block * groups, (block + 1) * groups)
        part = dataclasses.replace(
            weight,
            values=weight.values[:, of_inputs],
            scales=weight.scales[:, of_groups],
            offsets=None if weight.offsets is None else weight.offsets[:, of_groups],
        )
        sums.append(quantized_linear(x[:, of_inputs], part, None))
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0] if bias is None else sums[0] + bias


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_inputs(
    kernel: NativeLinear, form: str, num_blocks: int, generator: torch.Generator
) -> None:
    weight = stored_weight(form, 32, 384, 50, generator)
    bias = torch.randn(50, generator=generator)
    x = torch.randn(9, 384, generator=generator)
    y = kernel.apply(x, kernel.pack(weight, bias, num_blocks=num_blocks))
    assert torch.equal(y, by_blocks(x, weight, num_blocks, bias))


@pytest.mark.covering(2)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_extreme_numbers_do_not_overflow(
    kernel: NativeLinear, form: str, sign: float, group_size: int, generator: torch.Generator
) -> None:
    """Every product of a group is the largest one there is, all of one sign."""
    weight = stored_weight(form, group_size, 1024, 20, generator)
    number = {"int8": -128, "int4": -8, "table": 0}[form.split()[0]]
    weight = dataclasses.replace(weight, values=torch.full_like(weight.values, number))
    x = torch.full((3, 1024), sign)
    y = kernel.apply(x, kernel.pack(weight, None))
    assert torch.equal(y, quantized_linear(x, weight, None))
    exact = x.double() @ weight.dequantized().double().t()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_keeps_to_itself(kernel: NativeLinear, form: str, generator: torch.Generator) -> None:
    packed = kernel.pack(stored_weight(form, 32, 544, 90, generator), None)
    x = torch.randn(8, 544, generator=generator)
    expected = kernel.apply(x, packed)
    x[1] *= 20.0
    x[2] = 0.0
    x[5, 543], x[6, 0] = -torch.inf, torch.nan
    y = kernel.apply(x, packed)
    assert torch.equal(y[[0, 4, 7]], expected[[0, 4, 7]])
    assert y[1].isfinite().all()
    assert torch.equal(y[2], torch.zeros(90))
    assert y[5:7].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_experts(kernel: NativeLinear, form: str, generator: torch.Generator) -> None:
    weights = [stored_weight(form, 32, 96, 40, generator) for _ in range(3)]
    stacked = dataclasses.replace(
        weights[0],
        values=torch.stack([weight.values for weight in weights]),
        scales=torch.stack([weight.scales for weight in weights]),
        offsets=None
        if weights[0].offsets is None
        else torch.stack([weight.offsets for weight in weights if weight.offsets is not None]),
    )
    bias = torch.randn(3, 40, generator=generator)
    x = torch.randn(7, 96, generator=generator)
    experts = torch.tensor([[0, 2], [2, 1], [2, 0], [0, 1], [2, 1], [0, 2], [2, 0]])
    routes = sort_routes(experts.int(), torch.ones(7, 2), 3)
    y = kernel.apply_grouped(x, kernel.pack(stacked, bias), routes)
    for pair, expert in enumerate(experts.flatten().tolist()):
        weight = dataclasses.replace(weights[expert], table=weights[0].table)
        expected = quantized_linear(x[pair // 2 : pair // 2 + 1], weight, bias[expert])
        assert torch.equal(y[pair], expected[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_recorded_step(form: str, generator: torch.Generator) -> None:
    weight = stored_weight(form, 32, 96, 40, generator)
    kernels = NativeKernels(load_library(), 2)
    packed = kernels.pack_linear(weight, None)
    for _ in range(3):
        x = torch.randn(4, 96, generator=generator)
        y = kernels.repeat("a step", [x], lambda x=x: kernels.linear(x, packed))  # type: ignore[misc]
        assert torch.equal(y, quantized_linear(x, weight, None))
        assert torch.equal(kernels.linear_apart(x, packed, x.dtype), y)


@pytest.mark.parametrize("form", FORMS)
def test_the_packed_layout_is_the_same_for_every_instruction_set(
    form: str, generator: torch.Generator
) -> None:
    weight = stored_weight(form, 32, 96, 77, generator)
    panels = [make_kernel(name, 1).pack(weight, None).panels for name in instruction_sets()]
    assert all(torch.equal(panels[0], other) for other in panels[1:])


@pytest.mark.parametrize("form", FORMS)
def test_every_part_of_a_weight_counts(
    kernel: NativeLinear, form: str, generator: torch.Generator
) -> None:
    """A changed bit of a number, scale, offset or table gives other sums: no part is unread."""
    weight = stored_weight(form, 32, 64, 16, generator)
    packed = kernel.pack(weight, None)
    x = torch.rand(1, 64, generator=generator) + 0.5
    y = kernel.apply(x, packed)
    num_bytes = packed.panels.numel() // 8  # of the first panel: the others hold no output
    for place in range(0, num_bytes, 4):
        damaged = packed.panels.clone()
        damaged[place + 2] ^= 0x10
        found = kernel.apply(x, dataclasses.replace(packed, panels=damaged))
        is_entry = weight.table is not None and place >= num_bytes - 32
        assert not torch.equal(found, y) or (is_entry and _is_unused(weight, place % 16 + 2))


def _is_unused(weight: QuantizedWeight, entry: int) -> bool:
    return not bool((weight.values == entry).any())


SHAPES = st.tuples(
    st.sampled_from(FORMS),
    st.sampled_from(GROUP_SIZES),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 150),
    st.integers(1, 20),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@settings(max_examples=40, deadline=None)
@given(case=SHAPES)
def test_any_shape_and_group(
    instruction_set: str, case: tuple[str, int, int, int, int, int, int]
) -> None:
    form, group_size, num_groups, num_blocks, out_features, num_rows, seed = case
    generator = torch.Generator().manual_seed(seed)
    in_features = group_size * num_groups * num_blocks
    weight = stored_weight(form, group_size, in_features, out_features, generator)
    kernel = make_kernel(instruction_set, 1)
    x = torch.randn(num_rows, in_features, generator=generator)
    y = kernel.apply(x, kernel.pack(weight, None, num_blocks=num_blocks))
    assert torch.equal(y, by_blocks(x, weight, num_blocks))


def refused(weight: QuantizedWeight, num_blocks: int = 0) -> str:
    kernel = make_kernel(instruction_sets()[0], 1)
    assert not kernel.takes(weight, num_blocks)
    with pytest.raises(ConfigError) as error:
        kernel.pack(weight, None, num_blocks=num_blocks)
    return str(error.value)


def test_what_no_kernel_multiplies(generator: torch.Generator) -> None:
    """An error names the form, and what would be right."""
    odd = stored_weight("int8", 48, 96, 5, generator)
    assert re.search(naming("int8", 96, 48, "int4", 16, 64, 128), refused(odd))
    short = stored_weight("int4", 64, 96, 5, generator)
    assert re.search(naming("int4", 96, 64, "int8", 16, 1023, 128), refused(short))
    blocks = stored_weight("int8 offsets", 64, 128, 5, generator)
    assert re.search(naming("int8", 128, "4 blocks", 64, "int4", 16, 1023), refused(blocks, 4))
    table = stored_weight("table", 64, 128, 5, generator)
    high = dataclasses.replace(table, table=(largest_entry(64) + 1, *[0] * 15))
    assert re.search(naming("16 up to 1023", "int4", 128, 64, "int8"), refused(high))
    assert re.search(
        naming("table", "int4", 128, 64, "int8"),
        refused(dataclasses.replace(table, table=(1, 2, 3))),
    )
    both = dataclasses.replace(table, offsets=table.scales)
    assert re.search(naming("int4", "table", 128, 64, "int8", 16), refused(both))
    fp8 = dataclasses.replace(odd, precision=WeightPrecision.FP8, group_size=96)
    assert re.search(naming("fp8", 96, "int8", "int4", 16), refused(fp8))


def test_what_they_take_is_what_they_pack(generator: torch.Generator) -> None:
    kernel = make_kernel(instruction_sets()[0], 1)
    for form in FORMS:
        weight = stored_weight(form, 64, 256, 5, generator)
        assert kernel.takes(weight)
        assert kernel.takes(weight, 4)
        packed = kernel.pack(weight, None, num_blocks=4)
        assert isinstance(packed, NativeWeight)
        assert (packed.group_size, packed.num_blocks) == (64, 4)
