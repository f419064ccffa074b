"""Launches of what a tuning may choose in place of the sizes that the other cases have."""

import dataclasses
import functools

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import experts
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import empty_weight, pack_weight
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraBatch, LoraCells, LoraPlace, LoraSegments
from loraplex.kernels.sizes import CANDIDATES, DEFAULT_SIZES, ProgramSizes
from support.kernel_cases import Cases
from support.kernel_cases.experts import HIDDEN, INNER, RULES
from support.kernel_cases.linear import STORED
from support.kernel_cases.llamas import GPU, LLAMA_3_1_8B, empty
from support.kernel_cases.lora import device_batch, host_batch

_ROWS = {"decode": (16,), "few_rows": (64,), "many_rows": (2048,)}
_TOKENS = {"few_experts": 32, "some_experts": 300, "many_experts": 4096}
_QUANTIZED = (WeightPrecision.INT8, WeightPrecision.INT4)
_NUM_LAYERS = 4
_DOWN = LoraPlace(3, ("down_proj",), (0,))
_STORED = ("int4 of 128", "int8 of 16", "table of 64", "table of 16")


def cases() -> Cases:
    made: Cases = {}
    for name, candidates in CANDIDATES.items():
        for size in candidates:
            sizes = dataclasses.replace(DEFAULT_SIZES, **{name: size})
            for kind, launch in _launches(name, sizes).items():
                made[f"{name} {size}{kind}"] = launch
    return made


def _launches(name: str, sizes: ProgramSizes) -> Cases:
    """Return launches of one kind each, whose size is the one of that name."""
    if name == "invariant":
        native = functools.partial(_linear, sizes, WeightPrecision.NATIVE, 32, is_fixed=True)
        return {" bf16": native, " fp8 bf16": functools.partial(_fp8_shares, sizes)}
    if name in _TOKENS:
        return {" bf16": functools.partial(_experts, sizes, _TOKENS[name])}
    if name == "lora_splits":
        made = host_batch([1] * 32)
        return {" bf16": functools.partial(_lora, sizes, made)}
    found: Cases = {}
    for rows in _ROWS.get(name, ()):
        for precision in _QUANTIZED:
            launch = functools.partial(_linear, sizes, precision, rows, is_fixed=False)
            found[f" {precision.value} bf16"] = launch
        if name == "decode":
            for form in _STORED:
                found[f" stored {form} bf16"] = functools.partial(_stored, sizes, form, rows)
    return found


def _linear(
    sizes: ProgramSizes, precision: WeightPrecision, rows: int, *, is_fixed: bool
) -> torch.Tensor:
    kernel = CudaLinear(GPU, batch_invariant=is_fixed, sizes=sizes)
    weight = empty(LLAMA_3_1_8B.hidden, LLAMA_3_1_8B.inner, dtype=torch.bfloat16)
    is_native = precision is WeightPrecision.NATIVE
    packed = kernel.pack(weight, None) if is_native else empty_weight(weight, None, precision)
    return kernel.apply(empty(rows, LLAMA_3_1_8B.inner, dtype=torch.bfloat16), packed)


def _fp8_shares(sizes: ProgramSizes) -> torch.Tensor:
    kernel = CudaLinear(GPU, batch_invariant=True, sizes=sizes)
    weight = empty(LLAMA_3_1_8B.hidden, LLAMA_3_1_8B.inner, dtype=torch.bfloat16)
    packed = empty_weight(weight, None, WeightPrecision.FP8)
    return kernel.apply(empty(16, LLAMA_3_1_8B.inner, dtype=torch.bfloat16), packed)


def _stored(sizes: ProgramSizes, form: str, rows: int) -> torch.Tensor:
    kernel = CudaLinear(GPU, batch_invariant=False, sizes=sizes)
    weight = empty(LLAMA_3_1_8B.hidden, LLAMA_3_1_8B.inner, dtype=torch.bfloat16)
    packed = STORED[form].empty(weight, None)
    return kernel.apply(empty(rows, LLAMA_3_1_8B.inner, dtype=torch.bfloat16), packed)


def _experts(sizes: ProgramSizes, num_tokens: int) -> torch.Tensor:
    kernel = GroupedLinear(GPU, batch_invariant=False, sizes=sizes)
    logits = empty(num_tokens, RULES.num_experts, dtype=torch.bfloat16)
    weight = empty(RULES.num_experts, 2 * INNER, HIDDEN, dtype=torch.bfloat16)
    packed = pack_weight(weight, None, WeightPrecision.NATIVE)
    x = empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
    return kernel.apply(x, packed, experts.route(logits, RULES))


def _lora(sizes: ProgramSizes, made: tuple[LoraBatch, LoraSegments]) -> None:
    kernel = CudaLora(GPU, batch_invariant=False, sizes=sizes)
    llama = LLAMA_3_1_8B
    batch = device_batch(torch.bfloat16, made, LoraCells([llama.modules] * _NUM_LAYERS))
    x = empty(32, llama.inner, dtype=torch.bfloat16)
    kernel.add(empty(32, llama.hidden, dtype=torch.bfloat16), x, batch, _DOWN)
