"""y = x W^T + bias with weights that are packed once, at load (native/src/linear.cpp)."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.ops import LinearParts, PackedLinear
from loraplex.kernels.quantization import (
    GROUP_SIZES,
    SUPER_BLOCK,
    SUPER_BLOCK_GROUPS,
    QuantizedWeight,
    StoredNumbers,
    SuperBlockWeight,
    group_size_of,
    largest_entry,
    quantize,
)
from loraplex.kernels.routing import Routes

PACKED_LAYOUT = "panels-4"
"""Layout of the bytes of NativeWeight.panels; another name whenever they change. Little endian, the
same for every instruction set."""

BLOCK_COUNTS = (1, 2, 4, 8)
"""Numbers of blocks that the inputs of a row layer may be cut into (LORAPLEX_MAX_BLOCKS)."""


class WeightKind(enum.IntEnum):
    """What a packed weight holds: loraplex_weight_kind."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT8_OFFSETS = 5
    INT4_OFFSETS = 6
    TABLE4 = 7
    INT8_BY_INT8 = 8
    INT4_BY_INT8 = 9
    SUPER4 = 10
    SUPER6 = 11
    SUPER6_OFFSETS = 12


_KINDS = {
    torch.float32: WeightKind.FLOAT32,
    torch.bfloat16: WeightKind.BFLOAT16,
    torch.float16: WeightKind.FLOAT16,
}
_NARROW_BITS = 4
_ROWS_AT_ONCE = 256
_FLOATS = {kind: dtype for dtype, kind in _KINDS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight [out_features, in_features] in panels (native/src/packed_weight.h), and its bias.

    Of experts: their panels one after another, and the bias [experts, out_features].
    """

    kind: WeightKind
    group_size: int  # inputs that share a scale; 0 if nothing is scaled
    num_blocks: int  # of the inputs of a row layer; 0: of another
    out_features: int
    in_features: int
    panels: torch.Tensor  # bytes, of any alignment and only read; 64 is fast
    bias: torch.Tensor | None  # [out_features] float32


class _PackedForm(NamedTuple):
    """First fields of a NativeWeight."""

    kind: WeightKind
    group_size: int
    num_blocks: int
    out_features: int
    in_features: int


class _Matrix(NamedTuple):
    """One matrix to be packed: values [out, in], and what belongs to its groups."""

    values: torch.Tensor
    scales: torch.Tensor | None = None  # [out, groups] float32, or [out, super-blocks]
    offsets: torch.Tensor | None = None  # likewise
    factors: torch.Tensor | None = None  # [out, groups] int8, of super-blocks
    minima: torch.Tensor | None = None  # likewise


class NativeLinear:
    """Packs weights and applies them. The sums are float32 whatever the types."""

    def __init__(
        self, library: NativeLibrary, pool: ThreadPool, channel: int | None = None
    ) -> None:
        """channel: the address of a loraplex_channel, over which row layers are added."""
        self._pool = pool
        self._channel = channel
        self._output = library.output
        self._packed_bytes = library.size_function(
            "loraplex_packed_weight_bytes", Int, Size, Size, Size, Size
        )
        self._pack = library.function(
            "loraplex_pack_weight",
            *(Pointer, Int, Size, Size),
            *(Pointer, Size, Pointer, Size, Pointer),
            *(Pointer, Pointer, Size, Pointer),
            *(Size, Size, Pointer),
        )
        self._gather_columns = library.function(
            "loraplex_gather_columns",
            *(Pointer, Pointer, Int, Size, Size),
            *(Value, Size, Value, Size),
        )
        self._linear = library.function(
            "loraplex_linear",
            *(Pointer, Int, Size, Size, Int),
            *(Value, Size, Size),
            *(Pointer, Size, Size, Pointer),
            *(Pointer, Value, Size),
        )
        self._grouped_linear = library.function(
            "loraplex_grouped_linear",
            *(Pointer, Int, Size, Size, Int),
            *(Value, Size, Size, Size),
            *(Value, Value, Size),
            *(Pointer, Size, Size, Pointer),
            *(Pointer, Value, Size),
        )

        self._weight_rows = library.function(
            "loraplex_weight_rows",
            *(Pointer, Int, Size, Size),
            *(Pointer, Size, Size),
            *(Value, Size, Int, Value, Size),
        )

    def packed_bytes(
        self,
        kind: WeightKind,
        group_size: int,
        num_blocks: int,
        out_features: int,
        in_features: int,
    ) -> int:
        """Return the bytes of the panels; 0 if there can be no such weight."""
        return self._packed_bytes(kind, group_size, max(1, num_blocks), out_features, in_features)

    def pack(
        self,
        weight: torch.Tensor | StoredNumbers,
        bias: torch.Tensor | None,
        precision: WeightPrecision = WeightPrecision.NATIVE,
        num_blocks: int = 0,
    ) -> NativeWeight:
        """weight [out, in] or [E, out, in] float32, bfloat16 or float16; bias [..., out] or None.

        A weight that is quantised already keeps its numbers; `precision` is of others.

        Raises ConfigError if the weight cannot be quantised to the precision, or cut into blocks,
        or if the kernels cannot multiply a quantised one.
        """
        if not isinstance(weight, torch.Tensor):
            return self._pack_quantized(weight, bias, num_blocks)
        if precision is WeightPrecision.FP8:
            raise ConfigError("fp8 needs a GPU; on a CPU int8 takes as little memory")
        matrices = weight.unsqueeze(0) if weight.dim() == 2 else weight
        num_experts, out_features, in_features = matrices.shape
        _check_blocks(num_blocks, in_features)
        sizes = (num_blocks, out_features, in_features)
        if precision is WeightPrecision.NATIVE:
            form = _PackedForm(_KINDS[weight.dtype], 0, *sizes)
            return self._pack_all(form, map(_Matrix, matrices), bias, num_experts)
        block_inputs = in_features // max(1, num_blocks)
        group_size = group_size_of(precision, block_inputs)
        # Of weights that are rounded here the inputs are rounded, too.
        form = _PackedForm(WeightKind[f"{precision.name}_BY_INT8"], group_size, *sizes)
        rows = (_quantized_by_block(matrix, precision, block_inputs) for matrix in matrices)
        return self._pack_all(form, rows, bias, num_experts)

    def takes(self, weight: StoredNumbers, num_blocks: int = 0) -> bool:
        """Whether the kernels multiply the weight as it is, with its inputs in so many blocks."""
        return self._form_of(weight, num_blocks) is not None

    def _form_of(self, weight: StoredNumbers, num_blocks: int) -> _PackedForm | None:
        """Return the form of a packed weight that keeps the numbers; None if there is none."""
        kind = _kind_of(weight)
        out_features, in_features = weight.values.shape[-2:]
        is_cut = num_blocks > 1 and in_features // num_blocks % weight.group_size
        if kind is None or is_cut:
            return None
        form = _PackedForm(kind, weight.group_size, num_blocks, out_features, in_features)
        return form if self.packed_bytes(*form) else None

    def _pack_quantized(
        self, weight: StoredNumbers, bias: torch.Tensor | None, num_blocks: int
    ) -> NativeWeight:
        _check_blocks(num_blocks, weight.values.shape[-1])
        form = self._form_of(weight, num_blocks)
        if form is None:
            raise ConfigError(_why_not(weight, num_blocks))
        table = None
        if isinstance(weight, QuantizedWeight) and weight.table is not None:
            table = torch.tensor(weight.table, dtype=torch.int16)
        num_experts = weight.values.shape[:-2].numel()
        return self._pack_all(form, _matrices_of(weight), bias, num_experts, table)

    def _pack_all(
        self,
        form: _PackedForm,
        matrices: Iterable[_Matrix],
        bias: torch.Tensor | None,
        num_experts: int = 1,
        table: torch.Tensor | None = None,
    ) -> NativeWeight:
        """matrices: of each expert, one after another. table: [16] int16."""
        panels = torch.empty(num_experts, self.packed_bytes(*form), dtype=torch.uint8)
        for (values, scales, offsets, *levels), place in zip(matrices, panels, strict=True):
            rows = values if values.stride(1) == 1 else values.contiguous()
            factors_stride = 0 if levels[0] is None else levels[0].stride(0)
            self._pack(
                *(self._pool.address, form.kind, form.group_size, max(1, form.num_blocks)),
                *(rows.data_ptr(), rows.stride(0)),
                *((None, 0) if scales is None else (scales.data_ptr(), scales.stride(0))),
                None if offsets is None else offsets.data_ptr(),
                *(None if tensor is None else tensor.data_ptr() for tensor in levels),
                *(factors_stride, None if table is None else table.data_ptr()),
                *(form.out_features, form.in_features, place.data_ptr()),
            )
        wide_bias = None if bias is None else bias.float().contiguous()
        return NativeWeight(*form, panels.flatten(), wide_bias)

    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] -> [T, out] of the same dtype."""
        weight = _own(packed)
        y = self._output((x.shape[0], weight.out_features), x.dtype)
        self.apply_into(y, x, weight)
        return y

    def apply_into(self, y: torch.Tensor, x: torch.Tensor, weight: NativeWeight) -> None:
        """x [T, in] -> y [T, out] of the same dtype. The rows of both may be apart."""
        num_rows, in_features = x.shape
        assert in_features == weight.in_features
        assert y.shape == (num_rows, weight.out_features)
        assert y.dtype == x.dtype
        assert y.stride(1) == 1 or weight.out_features == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        self._linear(
            *(self._pool.address, *_form_words(weight), DTYPES[x.dtype]),
            *(x.data_ptr(), x.stride(0), num_rows),
            *(weight.panels.data_ptr(), weight.out_features, in_features),
            None if weight.bias is None else weight.bias.data_ptr(),
            *(self._channel_of(weight), y.data_ptr(), y.stride(0)),
        )

    def apply_apart(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        dtype: torch.dtype,  # noqa: ARG002 - panels take float32 whatever they hold
    ) -> torch.Tensor:
        """Do the same without the bias."""
        return self.apply(x, dataclasses.replace(_own(packed), bias=None))

    def rows(self, packed: PackedLinear, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of a weight without experts as numbers: indices [n] int64 -> [n, in]."""
        weight = _own(packed)
        y = self._output((len(indices), weight.in_features), dtype)
        self._weight_rows(
            *(self._pool.address, *_form_words(weight)),
            *(weight.panels.data_ptr(), weight.out_features, weight.in_features),
            *(indices.data_ptr(), len(indices), DTYPES[dtype], y.data_ptr(), y.stride(0)),
        )
        return y

    def squared_row_norms(self, packed: PackedLinear) -> torch.Tensor:
        """[out_features] float64: of each row, the sum of its squares.

        Blocks are added like their products: (b0 + b1) + (b2 + b3).
        """
        weight = _own(packed)
        num_blocks = max(1, weight.num_blocks)
        norms = torch.cat(
            [
                self.rows(weight, rows, torch.float32)
                .double()
                .view(len(rows), num_blocks, -1)
                .square()
                .sum(2)
                for rows in torch.split(torch.arange(weight.out_features), _ROWS_AT_ONCE)
            ]
        )
        while norms.shape[1] > 1:
            norms = norms[:, ::2] + norms[:, 1::2]
        return norms.squeeze(1)

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """x [T, n] of each rank -> [T, total]. The rows of x may be apart."""
        if self._channel is None:
            return x
        num_rows, num_columns = x.shape
        assert x.stride(1) == 1 or num_columns == 1
        y = self._output((num_rows, total), x.dtype)
        self._gather_columns(
            *(self._pool.address, self._channel, DTYPES[x.dtype], num_rows, total),
            *(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)),
        )
        return y

    def _channel_of(self, weight: NativeWeight) -> int | None:
        return self._channel if weight.num_blocks else None

    def apply_grouped(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        """x [T, in] or [T * k, in] -> [T * k, out] of the same dtype, by each pair's expert."""
        weight = _own(packed)
        num_rows, in_features = x.shape
        num_pairs = len(routes.pairs)
        assert in_features == weight.in_features
        form = (weight.kind, weight.group_size, weight.num_blocks)
        num_bytes = self.packed_bytes(*form, weight.out_features, in_features)
        assert weight.panels.numel() == routes.num_experts * num_bytes
        if x.stride(1) != 1:
            x = x.contiguous()
        y = self._output((num_pairs, weight.out_features), x.dtype)
        self._grouped_linear(
            *(self._pool.address, *_form_words(weight), DTYPES[x.dtype]),
            *(x.data_ptr(), x.stride(0), num_pairs),
            routes.num_chosen if num_rows < num_pairs else 1,
            *(routes.pairs.data_ptr(), routes.starts.data_ptr(), routes.num_experts),
            *(weight.panels.data_ptr(), weight.out_features, in_features),
            None if weight.bias is None else weight.bias.data_ptr(),
            *(self._channel_of(weight), y.data_ptr(), y.stride(0)),
        )
        return y


def linear_parts(packed: PackedLinear) -> LinearParts:
    weight = _own(packed)
    sizes = (weight.group_size, weight.num_blocks, weight.out_features, weight.in_features)
    return LinearParts((int(weight.kind), *sizes), (weight.panels, weight.bias))


def join_linear(parts: LinearParts) -> NativeWeight:
    kind, group_size, num_blocks, out_features, in_features = parts.numbers
    panels, bias = parts.tensors
    assert panels is not None
    form = _PackedForm(WeightKind(kind), group_size, num_blocks, out_features, in_features)
    return NativeWeight(*form, panels, bias)


def _own(packed: PackedLinear) -> NativeWeight:
    assert isinstance(packed, NativeWeight)
    return packed


def _form_words(weight: NativeWeight) -> tuple[int, int, int]:
    return weight.kind, weight.group_size, max(1, weight.num_blocks)


def _check_blocks(num_blocks: int, in_features: int) -> None:
    if num_blocks not in (0, *BLOCK_COUNTS) or (num_blocks and in_features % num_blocks):
        raise ConfigError(
            f"a row layer of {in_features} inputs cannot be cut into {num_blocks} blocks: their "
            f"number must divide the inputs and be one of {', '.join(map(str, BLOCK_COUNTS))}"
        )


def _kind_of(weight: StoredNumbers) -> WeightKind | None:
    """Return the kind with the weight's numbers and what belongs to them; None if there is none."""
    if isinstance(weight, SuperBlockWeight):
        if weight.bits == _NARROW_BITS:
            return WeightKind.SUPER4 if weight.levels.minima is not None else None
        return WeightKind.SUPER6 if weight.levels.minima is None else WeightKind.SUPER6_OFFSETS
    if weight.table is None:
        plain = "_BY_INT8" if weight.has_byte_inputs else ""
        end = plain if weight.offsets is None else "_OFFSETS"
        return WeightKind.__members__.get(f"{weight.precision.name}{end}")
    largest = largest_entry(weight.group_size)
    is_table = len(weight.table) == 16 and all(abs(entry) <= largest for entry in weight.table)
    is_table &= weight.offsets is None and weight.precision is WeightPrecision.INT4
    return WeightKind.TABLE4 if is_table else None


def _matrices_of(weight: StoredNumbers) -> Iterable[_Matrix]:
    """Return each expert's matrix, or the only one."""
    if isinstance(weight, QuantizedWeight):
        tensors = [weight.values, weight.scales, weight.offsets, None, None]
    else:
        levels = weight.levels
        of_groups = [levels.factors, levels.minima]
        tensors = [weight.values, levels.scales, levels.minimum_scales, *of_groups]
    num_experts = weight.values.shape[:-2].numel()
    return map(
        _Matrix,
        *(
            itertools.repeat(None, num_experts)
            if tensor is None
            else tensor.contiguous().view(-1, *tensor.shape[-2:])
            for tensor in tensors
        ),
    )


def _why_not(weight: StoredNumbers, num_blocks: int) -> str:
    if isinstance(weight, SuperBlockWeight):
        return (
            f"no kernel of a CPU multiplies a weight of {weight.bits} bits in super-blocks, "
            f"{weight.values.shape[-1]} inputs in {max(1, num_blocks)} blocks and groups of "
            f"{weight.group_size}: they multiply 4 bits with minima and 6 bits, in groups of "
            f"{' or '.join(map(str, SUPER_BLOCK_GROUPS))}, whose super-blocks of {SUPER_BLOCK} "
            "divide the inputs of each block; widen the weight to float16 instead"
        )
    what = weight.precision.value
    if weight.table is not None:
        what += " numbers of a table"
    if weight.offsets is not None:
        what += " with offsets"
    inputs = f"{weight.values.shape[-1]} inputs"
    if num_blocks > 1:
        inputs += f" in {num_blocks} blocks"
    return (
        f"no kernel of a CPU multiplies a quantised weight of {what}, {inputs} and groups of "
        f"{weight.group_size}: they multiply int8 and int4 numbers, with offsets or without, and "
        f"int4 numbers of a table of 16 up to {largest_entry(weight.group_size)}, in groups of "
        f"{', '.join(map(str, sorted(GROUP_SIZES)))} inputs, which divide those of int4 and of "
        "each block; widen the weight to float16 instead"
    )


def _quantized_by_block(
    matrix: torch.Tensor, precision: WeightPrecision, block_inputs: int
) -> _Matrix:
    """Return the matrix with the groups of one block after another."""
    blocks = [quantize(block, precision) for block in torch.split(matrix, block_inputs, 1)]
    values = torch.cat([block.values for block in blocks], dim=1)
    return _Matrix(values, torch.cat([block.scales for block in blocks], dim=1))
