"""y = x W^T + bias on a GPU: cuBLAS, or Triton where it has no such product or promises too little.

What is packed is only read, so it may be applied from any thread, on any queue.
"""

import dataclasses

import torch
from torch.nn import functional

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import elementwise
from loraplex.kernels.cuda.linear_packing import CudaWeight, pack_weight
from loraplex.kernels.cuda.linear_products import ScaledLinear, check_fp8, fixed_linear, fp8_product
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.ops import LinearParts, PackedLinear
from loraplex.kernels.quantization import GROUP_SIZES, QuantizedWeight, StoredNumbers
from loraplex.kernels.sizes import DEFAULT_SIZES, ProgramSizes

PACKED_LAYOUT = "cuda-4"
"""Layout of CudaWeight's tensors; the name changes whenever they do."""

_PRECISIONS = tuple(WeightPrecision)


class CudaLinear:
    """Packs weights and applies them. The sums are float32 whatever the types."""

    def __init__(
        self,
        device: torch.device,
        *,
        batch_invariant: bool,
        sums: RankSums | None = None,
        sizes: ProgramSizes = DEFAULT_SIZES,
    ) -> None:
        """batch_invariant: no result depends on the number of rows, to the bit; slower.

        sums: over the ranks of a row layer; None: there is one rank.
        """
        self._sums = sums
        self._is_host = device.type == "cpu"
        self._is_fixed = batch_invariant
        if device.type == "cuda":
            # Else cuBLAS may add the parts of a split sum in 16 bits.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._sizes = sizes
        self._scaled = ScaledLinear(device, batch_invariant=batch_invariant, sizes=sizes)
        self._fp8_linear = fp8_product(device, batch_invariant=batch_invariant, sizes=sizes)

    def pack(
        self,
        weight: torch.Tensor | StoredNumbers,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> CudaWeight:
        """weight [out, in], bias [out] or None, both of the model's type, on the device.

        A weight that is quantised already keeps its numbers, whatever the precision.
        Or of experts: weight [E, out, in], bias [E, out].
        num_blocks of 1 or more: ranks have a part of the inputs.

        Raises ConfigError if the weight cannot be quantised to the precision, or the device cannot
        multiply it.
        """
        if precision is WeightPrecision.FP8 and isinstance(weight, torch.Tensor):
            check_fp8(weight)
        return dataclasses.replace(pack_weight(weight, bias, precision), is_row=num_blocks > 0)

    @staticmethod
    def takes(weight: StoredNumbers, num_blocks: int) -> bool:
        """All but fp8 and super-blocks: these are taken as groups with scales of one level.

        A rank packs its own inputs, so the blocks of ranks do not matter.
        """
        del num_blocks
        if not isinstance(weight, QuantizedWeight):
            return False
        is_narrow = weight.precision in (WeightPrecision.INT8, WeightPrecision.INT4)
        return is_narrow and weight.group_size in GROUP_SIZES

    @staticmethod
    def rows(packed: PackedLinear, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of a layer that is not quantised: indices [T] int64 -> [T, in]."""
        assert isinstance(packed, CudaWeight)
        assert packed.precision is WeightPrecision.NATIVE
        return elementwise.take_rows(packed.weight, indices).to(dtype)

    def parts(self, packed: PackedLinear) -> LinearParts:
        assert isinstance(packed, CudaWeight)
        precision = _PRECISIONS.index(packed.precision)
        sizes = (packed.group_size, packed.in_features, packed.num_experts)
        numbers = (precision, *sizes, int(packed.is_row))
        tensors = (packed.weight, packed.bias, packed.scales, packed.offsets, packed.table)
        return LinearParts(numbers, tensors)

    def join(self, parts: LinearParts) -> CudaWeight:
        precision, group_size, in_features, num_experts, is_row = parts.numbers
        weight, bias, scales, offsets, table = parts.tensors
        assert weight is not None
        form = (_PRECISIONS[precision], group_size, in_features)
        return CudaWeight(
            *(*form, weight, bias, scales, num_experts),
            is_row=bool(is_row),
            offsets=offsets,
            table=table,
        )

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] of the model's type -> [T, out]."""
        assert isinstance(packed, CudaWeight)
        if self._sums is None or not packed.is_row:
            return self._product(x, packed, x.dtype)
        share = self._product(x, dataclasses.replace(packed, bias=None), torch.float32)
        return self._sums.total(share, packed.bias, x.dtype)

    def _product(self, x: torch.Tensor, packed: CudaWeight, dtype: torch.dtype) -> torch.Tensor:
        """dtype: x's, or float32 for a weight without bias."""
        assert x.shape[1] == packed.in_features
        if not len(x):
            return x.new_empty(0, packed.out_features, dtype=dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        match packed.precision:
            case WeightPrecision.NATIVE:
                if self._is_fixed:
                    return fixed_linear(x, packed, dtype=dtype, tile=self._sizes.invariant)
                if dtype == x.dtype:
                    return functional.linear(x, packed.weight, packed.bias)
                return self._wide_product(x, packed)
            case WeightPrecision.FP8:
                return self._fp8_linear(x, packed, dtype)
        return self._scaled.apply(x, packed, dtype)

    def size_of(self, x: torch.Tensor, packed: PackedLinear) -> str | None:
        """Return the name of the size that decides `apply`; None: there is none."""
        assert isinstance(packed, CudaWeight)
        match packed.precision:
            case WeightPrecision.NATIVE | WeightPrecision.FP8:
                return "invariant" if self._is_fixed and x.dtype != torch.float32 else None
        return self._scaled.size_of(len(x), x.dtype, packed)

    def _wide_product(self, x: torch.Tensor, packed: CudaWeight) -> torch.Tensor:
        """x [T, in] of 16 bits -> [T, out] float32, as it was summed."""
        if self._is_host:  # cuBLAS alone has such a product
            return functional.linear(x.float(), packed.weight.float())
        return torch.mm(x, packed.weight.t(), out_dtype=torch.float32)

    def apply_apart(
        self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype
    ) -> torch.Tensor:
        """`apply` without the bias, and of a row layer only for this rank's inputs."""
        assert isinstance(packed, CudaWeight)
        # Triton starts kernels on the device of the thread, which compute() chose for the first.
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            return self._product(x.to(dtype), dataclasses.replace(packed, bias=None), dtype)
