"""The weights of a linear layer as the GPU's kernels read them.

The numbers of an output lie together, so that a thread loads 16 bytes of them at once. fp8: as they
are, which is how cuBLAS takes them. int8 and int4: padded to blocks of 128 inputs, in words of 16
bits. A word holds 2 or 4 numbers, which are 64 or 32 inputs apart (programs/linear_quantized.py),
or the inputs of a smaller group. Scales and offsets are [groups, out]: neighbouring
outputs are loaded together.
"""

import dataclasses
from collections.abc import Iterator

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.ops import PackedLinear
from loraplex.kernels.quantization import (
    FP8_DTYPE,
    QuantizedWeight,
    StoredNumbers,
    group_size_of,
    quantize,
)

BLOCK = 128
"""Inputs of int8 and int4 that are summed in one step, at most."""
_BITS = {WeightPrecision.INT8: 8, WeightPrecision.INT4: 4}
_WORD_BITS = 16
_TABLE_DTYPES = (torch.float16, torch.bfloat16)
_VALUES_AT_ONCE = 1 << 24
"""Values converted at once: there is never a float32 copy of a whole lm_head."""


@dataclasses.dataclass(frozen=True, slots=True)
class CudaWeight:
    """A weight [out_features, in_features], and its bias; or those of some experts.

    The outputs of experts lie one after another, as if they were those of one layer.
    """

    precision: WeightPrecision
    group_size: int  # inputs that share a scale; 0 if nothing is scaled
    in_features: int
    weight: torch.Tensor  # [outputs, ...] of the model's type, FP8_DTYPE, or int16 words
    bias: torch.Tensor | None  # [outputs] of the model's type
    scales: torch.Tensor | None  # [groups, outputs] float32
    num_experts: int = 1
    is_row: bool = False
    """Whether ranks have a part of the inputs each."""
    offsets: torch.Tensor | None = None  # [groups, outputs] float32
    table: torch.Tensor | None = None  # [2, 16] int16: bits of float16, of bfloat16

    @property
    def block(self) -> int:
        """Inputs that are summed in one step."""
        return _words_per_block(self.precision, self.group_size) * _parts(self.precision)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of all experts."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self.num_outputs // self.num_experts


def pack_weight(
    weight: torch.Tensor | StoredNumbers, bias: torch.Tensor | None, precision: WeightPrecision
) -> CudaWeight:
    """weight [out, in], bias [out], or [E, out, in] and [E, out], of experts.

    A weight that is quantised already keeps its numbers, whatever the precision.

    A weight that is not quantised is kept itself, if it is contiguous. A quantised one is converted
    some rows at a time, where it lies. Raises ConfigError if it cannot be quantised.
    """
    if isinstance(weight, QuantizedWeight):
        return _pack_quantized(weight, bias)
    assert isinstance(weight, torch.Tensor), "groups have scales of one level"
    in_features = weight.shape[-1]
    group_size = group_size_of(precision, in_features)
    if precision is WeightPrecision.NATIVE:
        outputs = weight.contiguous().flatten(0, -2)
        bias = None if bias is None else bias.flatten()
        sizes = (group_size, in_features)
        return CudaWeight(precision, *sizes, outputs, bias, None, _num_experts(weight))
    packed = empty_weight(weight, bias, precision)
    assert packed.scales is not None
    weight = weight.flatten(0, -2)
    for rows in _slabs(weight):
        quantized = quantize(weight[rows], precision, group_size)
        packed.weight[rows] = _arranged(quantized)
        packed.scales[: quantized.scales.shape[1], rows] = quantized.scales.t()
    return packed


def _pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> CudaWeight:
    """weight [out, in], or [E, out, in], and its bias."""
    packed = empty_weight(weight.values, bias, weight.precision, weight.group_size)
    assert packed.scales is not None
    num_groups = weight.scales.shape[-1]
    packed.scales[:num_groups] = weight.scales.flatten(0, -2).t()
    offsets, table = None, None
    if weight.offsets is not None:
        offsets = torch.zeros_like(packed.scales)
        offsets[:num_groups] = weight.offsets.flatten(0, -2).t()
    if weight.table is not None:
        entries = torch.tensor(weight.table, device=weight.values.device)
        table = torch.stack([entries.to(dtype).view(torch.int16) for dtype in _TABLE_DTYPES])
    values = weight.values.flatten(0, -2)
    for rows in _slabs(values):
        # The numbers of a table are 0 .. 15, which is what the nibbles of others are, too.
        numbers = values[rows] if table is None else values[rows] - 8
        packed.weight[rows] = _words(numbers, weight.precision, weight.group_size)
    return dataclasses.replace(packed, offsets=offsets, table=table)


def empty_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: WeightPrecision,
    group_size: int | None = None,
) -> CudaWeight:
    """What a weight [out, in], or [E, out, in], is quantised into: zeros.

    group_size: where it is not the usual one.
    """
    in_features = weight.shape[-1]
    num_outputs = weight.numel() // in_features
    group_size = group_size or group_size_of(precision, in_features)
    padded, columns, dtype = in_features, in_features, FP8_DTYPE
    if precision in _BITS:
        padded += -in_features % (_words_per_block(precision, group_size) * _parts(precision))
        columns, dtype = padded * _BITS[precision] // _WORD_BITS, torch.int16
    numbers = torch.zeros(num_outputs, columns, dtype=dtype, device=weight.device)
    scales = torch.zeros(
        -(-padded // group_size), num_outputs, dtype=torch.float32, device=weight.device
    )
    bias = None if bias is None else bias.flatten()
    sizes = (group_size, in_features)
    return CudaWeight(precision, *sizes, numbers, bias, scales, _num_experts(weight))


def _num_experts(weight: torch.Tensor) -> int:
    return 1 if weight.dim() == 2 else weight.shape[0]


def dequantized_rows(packed: CudaWeight, rows: slice) -> torch.Tensor:
    """[rows, in] float32: what these rows of the packed weight stand for."""
    if packed.scales is None:
        return packed.weight[rows].float()
    numbers = packed.weight[rows]
    if packed.precision in _BITS:
        numbers = _numbers(numbers, packed.precision, packed.group_size)[:, : packed.in_features]
    scales = packed.scales[:, rows].t()
    offsets = None if packed.offsets is None else packed.offsets[:, rows].t()
    table = None
    if packed.table is not None:
        numbers = numbers + 8
        table = tuple(int(entry) for entry in packed.table[0].view(_TABLE_DTYPES[0]))
    form = (packed.precision, packed.group_size, numbers, scales)
    return QuantizedWeight(*form, offsets=offsets, table=table).dequantized()


def squared_row_norms(packed: PackedLinear) -> torch.Tensor:
    """[outputs] float64: of each row of what the weight stands for."""
    assert isinstance(packed, CudaWeight)
    sums = [dequantized_rows(packed, rows).double().square_().sum(1) for rows in _slabs(packed)]
    return torch.cat(sums)


def _slabs(weight: torch.Tensor | CudaWeight) -> Iterator[slice]:
    """Rows that are converted at once."""
    if isinstance(weight, CudaWeight):
        num_rows, size = weight.num_outputs, weight.in_features
    else:
        num_rows, size = weight.shape
    at_once = max(1, _VALUES_AT_ONCE // size)
    return (slice(first, first + at_once) for first in range(0, num_rows, at_once))


def _arranged(quantized: QuantizedWeight) -> torch.Tensor:
    """Rows as they are packed."""
    values = quantized.values
    if quantized.precision not in _BITS:
        return values
    return _words(values, quantized.precision, quantized.group_size)


def _parts(precision: WeightPrecision) -> int:
    """Numbers of a word."""
    return _WORD_BITS // _BITS[precision]


def _words_per_block(precision: WeightPrecision, group_size: int) -> int:
    """Words of a block: its parts are not larger than a group, so that each has one scale."""
    return min(BLOCK // _parts(precision), group_size)


def _words(values: torch.Tensor, precision: WeightPrecision, group_size: int) -> torch.Tensor:
    """int8 [rows, in] -> int16 [rows, words]. Bytes are signed; nibbles are 8 too large."""
    bits, num_parts = _BITS[precision], _parts(precision)
    num_words = _words_per_block(precision, group_size)
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % (num_words * num_parts)))
    numbers = padded.view(len(values), -1, num_parts, num_words).to(torch.int32)
    numbers = numbers + 8 if bits == _BITS[WeightPrecision.INT4] else numbers & 0xFF
    words = numbers[:, :, 0]
    for part in range(1, num_parts):
        words = words | numbers[:, :, part] << (part * bits)
    return words.to(torch.int16).reshape(len(values), -1)


def _numbers(words: torch.Tensor, precision: WeightPrecision, group_size: int) -> torch.Tensor:
    """int16 [rows, words] -> int8 [rows, padded inputs]."""
    bits, num_parts = _BITS[precision], _parts(precision)
    blocks = words.view(len(words), -1, 1, _words_per_block(precision, group_size))
    parts = [blocks >> (part * bits) for part in range(num_parts)]
    numbers = torch.cat(parts, 2).view(len(words), -1)
    if bits == _BITS[WeightPrecision.INT4]:
        numbers = (numbers & 15) - 8
    return numbers.to(torch.int8)
