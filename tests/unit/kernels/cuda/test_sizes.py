"""Sizes that a tuning may choose: right for every call, and batch-invariant as our own are."""

import dataclasses
from typing import Any

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.attention_launch import num_program_slots
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import empty_weight, pack_weight
from loraplex.kernels.quantization import quantize
from loraplex.kernels.routing import sort_routes
from loraplex.kernels.sizes import CANDIDATES, DEFAULT_SIZES, ProgramSizes, chosen_sizes

CPU = torch.device("cpu")
NATIVE, INT8, INT4, FP8 = WeightPrecision
ROW_COUNTS = (1, 16, 17, 64, 65, 4096)


def sizes_of(name: str) -> list[ProgramSizes]:
    return [dataclasses.replace(DEFAULT_SIZES, **{name: size}) for size in CANDIDATES[name]]


def gaussian(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).half()


def test_each_size_has_candidates_and_each_candidate_a_text() -> None:
    assert CANDIDATES.keys() == {field.name for field in dataclasses.fields(ProgramSizes)}
    for name, candidates in CANDIDATES.items():
        texts = [str(size) for size in (getattr(DEFAULT_SIZES, name), *candidates)]
        assert len(set(texts)) == len(texts)
        for size, text in zip(candidates, texts[1:], strict=True):
            assert chosen_sizes({name: text}) == dataclasses.replace(DEFAULT_SIZES, **{name: size})
    assert chosen_sizes({}) == DEFAULT_SIZES
    with pytest.raises(KeyError):
        chosen_sizes({"decode": "7x7"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_what_decides_a_batch_invariant_product_does_not_depend_on_its_rows(
    precision: WeightPrecision, dtype: torch.dtype
) -> None:
    meta = torch.device("meta")
    kernel = CudaLinear(CPU, batch_invariant=True)
    weight = torch.empty(64, 128, device=meta)
    is_native = precision is NATIVE
    packed = (
        pack_weight(weight, None, NATIVE) if is_native else empty_weight(weight, None, precision)
    )
    xs = [torch.empty(num_rows, 128, dtype=dtype, device=meta) for num_rows in ROW_COUNTS]
    names = {kernel.size_of(x, packed) for x in xs}
    narrow = "invariant" if precision in (NATIVE, FP8) else "few_rows"
    assert names == {None if dtype == torch.float32 else narrow}
    free = CudaLinear(CPU, batch_invariant=False)
    of_free = [free.size_of(x, packed) for x in xs]
    if precision in (INT8, INT4) and dtype != torch.float32:
        assert of_free == ["decode", "decode", "few_rows", "few_rows", "many_rows", "many_rows"]
    else:
        assert set(of_free) == {None}


def test_what_decides_a_product_of_experts() -> None:
    packed = pack_weight(torch.empty(4, 8, 16, dtype=torch.float16), None, NATIVE)
    names = {}
    for is_fixed in (False, True):
        kernel = GroupedLinear(CPU, batch_invariant=is_fixed)
        for num_pairs in (4, 100, 4096):
            experts = torch.zeros(num_pairs, 1, dtype=torch.int32)
            routes = sort_routes(experts, torch.ones(num_pairs, 1), 4)
            x = torch.empty(num_pairs, 16, dtype=torch.float16)
            names[is_fixed, num_pairs] = kernel.size_of(x, packed, routes)
    assert [names[False, count] for count in (4, 100, 4096)] == [
        "few_experts",
        "some_experts",
        "many_experts",
    ]
    assert {names[True, count] for count in (4, 100, 4096)} == {"some_experts"}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        *((NATIVE, sizes) for sizes in sizes_of("invariant")),
        *((INT4, sizes) for sizes in sizes_of("few_rows")),
        *((INT8, sizes) for sizes in sizes_of("few_rows")),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_company(
    precision: WeightPrecision, sizes: ProgramSizes
) -> None:
    kernel = CudaLinear(CPU, batch_invariant=True, sizes=sizes)
    packed = kernel.pack(gaussian(17, 160), gaussian(17), precision)
    x = gaussian(66, 160)
    expected = kernel.apply(x, packed)
    for num_rows in (1, 17, 40):
        assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])
    assert torch.equal(kernel.apply(x[65:], packed)[0], expected[65])


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [
        *((9, sizes) for sizes in sizes_of("decode")),
        *((40, sizes) for sizes in sizes_of("few_rows")),
        *((70, sizes) for sizes in sizes_of("many_rows")),
    ],
)
def test_every_candidate_gives_the_product(num_rows: int, sizes: ProgramSizes) -> None:
    kernel, weight = CudaLinear(CPU, batch_invariant=False, sizes=sizes), gaussian(70, 520)
    x = gaussian(num_rows, 520)
    y = kernel.apply(x, kernel.pack(weight, None, INT8)).double()
    expected = x.double() @ quantize(weight, INT8).dequantized().double().t()
    assert float((y - expected).norm() / expected.norm()) < 4e-4


def test_programs_of_attention_fill_the_processors() -> None:
    assert num_program_slots(CPU, 1) * 4 == num_program_slots(CPU, 4)


def test_a_backend_names_what_decides_its_ops() -> None:
    kernels: Any = CudaKernels(HostAccelerator(), sizes=ProgramSizes(lora_splits=16))
    packed = kernels.pack_linear(gaussian(8, 32), None, INT8)
    assert kernels.size_of("linear", (gaussian(3, 32), packed)) == "decode"
    assert kernels.size_of("rms_norm", (gaussian(3, 32), gaussian(32), 1e-6)) is None
    assert kernels.add_lora.__self__._most_splits == 16
