"""Launches of linear layers, but for those of cuBLAS."""

import dataclasses
import functools

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import CudaWeight, empty_weight
from loraplex.kernels.cuda.ranks import sum_of_shares
from support.kernel_cases import Cases
from support.kernel_cases.llamas import DTYPES, GPU, LLAMA_3_1_8B, empty


@dataclasses.dataclass(frozen=True, slots=True)
class StoredForm:
    """How weights are stored that were quantised elsewhere."""

    precision: WeightPrecision
    group_size: int
    has_offsets: bool = False
    has_table: bool = False

    def empty(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CudaWeight:
        """Return what a weight [out, in], or [E, out, in], is packed into."""
        packed = empty_weight(weight, bias, self.precision, self.group_size)
        assert packed.scales is not None
        return dataclasses.replace(
            packed,
            offsets=torch.zeros_like(packed.scales) if self.has_offsets else None,
            table=empty(2, 16, dtype=torch.int16) if self.has_table else None,
        )


_QUANTIZED = (WeightPrecision.INT8, WeightPrecision.INT4)
_COUNTS = (1, 16, 64, 2048)
"""Token counts: each has its own tiles, and 1 is not specialised like 16."""

STORED = {
    "int4 of 128": StoredForm(WeightPrecision.INT4, 128, has_offsets=True),
    "int4 of 32": StoredForm(WeightPrecision.INT4, 32, has_offsets=True),
    "int8 of 32": StoredForm(WeightPrecision.INT8, 32),
    "int8 of 16": StoredForm(WeightPrecision.INT8, 16, has_offsets=True),
    "table of 64": StoredForm(WeightPrecision.INT4, 64, has_table=True),
    "table of 16": StoredForm(WeightPrecision.INT4, 16, has_table=True),
}
"""Weights of checkpoints: GPTQ and AWQ, Q4_K, Q8_0, mixed K-quants, NF4 and NVFP4."""


def cases() -> Cases:
    made: Cases = {}
    for precision in _QUANTIZED:
        for kind, dtype in DTYPES.items():
            for count in _COUNTS:
                name = f"{precision.value} {kind} {count} tokens"
                made[name] = functools.partial(_apply, precision, dtype, count)
        name = f"{precision.value} bf16 invariant"
        made[name] = functools.partial(_apply, precision, torch.bfloat16, 32, invariant=True)
    for form in STORED:
        for count in _COUNTS:
            stored = functools.partial(_apply_stored, form, torch.bfloat16, count)
            made[f"stored {form} 8b bf16 {count} tokens"] = stored
        fixed = functools.partial(_apply_stored, form, torch.bfloat16, 32, invariant=True)
        made[f"stored {form} 8b bf16 invariant"] = fixed
        for kind in ("fp16", "fp32"):
            made[f"stored {form} {kind}"] = functools.partial(_apply_stored, form, DTYPES[kind], 16)
    made["fp8 bf16"] = functools.partial(_apply, WeightPrecision.FP8, torch.bfloat16, 16)
    made["fp8 bf16 invariant"] = functools.partial(
        _apply, WeightPrecision.FP8, torch.bfloat16, 16, invariant=True
    )
    for kind, dtype in DTYPES.items():
        native = functools.partial(_apply, WeightPrecision.NATIVE, dtype, 32, invariant=True)
        made[f"native {kind} invariant"] = native
        made[f"shares of ranks {kind}"] = functools.partial(_add_shares, dtype)
    made["8b bf16 shares of ranks"] = functools.partial(_add_shares, torch.bfloat16)
    return made


def _add_shares(dtype: torch.dtype) -> None:
    shares = empty(4, 32, LLAMA_3_1_8B.hidden, dtype=torch.float32)
    bias = empty(LLAMA_3_1_8B.hidden, dtype=dtype)
    assert sum_of_shares(shares, bias, dtype).dtype == dtype


def _apply(
    precision: WeightPrecision, dtype: torch.dtype, num_tokens: int, *, invariant: bool = False
) -> None:
    kernel = CudaLinear(GPU, batch_invariant=invariant)
    # The down projection: its sums are split.
    out_features, in_features = LLAMA_3_1_8B.hidden, LLAMA_3_1_8B.inner
    weight = empty(out_features, in_features, dtype=dtype)
    if precision is WeightPrecision.NATIVE:
        packed = kernel.pack(weight, None, precision)
    else:
        packed = empty_weight(weight, None, precision)
    assert kernel.apply(empty(num_tokens, in_features, dtype=dtype), packed).dtype == dtype


def _apply_stored(
    form: str, dtype: torch.dtype, num_tokens: int, *, invariant: bool = False
) -> None:
    kernel = CudaLinear(GPU, batch_invariant=invariant)
    out_features, in_features = LLAMA_3_1_8B.hidden, LLAMA_3_1_8B.inner
    packed = STORED[form].empty(empty(out_features, in_features, dtype=dtype), None)
    assert kernel.apply(empty(num_tokens, in_features, dtype=dtype), packed).dtype == dtype
