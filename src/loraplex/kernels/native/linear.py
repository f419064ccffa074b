"""y = x W^T + bias with weights that are packed once, at load (native/src/linear.cpp)."""

import dataclasses
import enum

import torch

from loraplex.kernels.native.library import DTYPES, Int, NativeLibrary, Pointer, Size, ThreadPool


class WeightKind(enum.IntEnum):
    """What a packed weight holds: loraplex_weight_kind."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


_KINDS = {
    torch.float32: WeightKind.FLOAT32,
    torch.bfloat16: WeightKind.BFLOAT16,
    torch.float16: WeightKind.FLOAT16,
}


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in panels (native/src/packed_weight.h), and its bias."""

    kind: WeightKind
    out_features: int
    in_features: int
    panels: torch.Tensor  # bytes
    bias: torch.Tensor | None  # [out_features] float32


class LinearKernel:
    """Packs weights and applies them. The sums are float32 whatever the types."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._packed_bytes = library.size_function("loraplex_packed_weight_bytes", Int, Size, Size)
        self._pack = library.function(
            "loraplex_pack_weight", Pointer, Int, Pointer, Size, Size, Size, Pointer
        )
        self._linear = library.function(
            "loraplex_linear",
            *(Pointer, Int, Int),
            *(Pointer, Size, Size),
            *(Pointer, Size, Size, Pointer),
            *(Pointer, Size),
        )

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """weight [out, in] float32, bfloat16 or float16; bias [out] or None."""
        out_features, in_features = weight.shape
        kind = _KINDS[weight.dtype]
        num_bytes = self._packed_bytes(kind, out_features, in_features)
        panels = torch.empty(num_bytes, dtype=torch.uint8)
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        self._pack(
            *(self._pool.address, kind, rows.data_ptr(), rows.stride(0)),
            *(out_features, in_features, panels.data_ptr()),
        )
        wide_bias = None if bias is None else bias.float().contiguous()
        return PackedWeight(kind, out_features, in_features, panels, wide_bias)

    def apply(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """x [T, in] -> [T, out] of the same dtype."""
        y = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype)
        self.apply_into(y, x, weight)
        return y

    def apply_into(self, y: torch.Tensor, x: torch.Tensor, weight: PackedWeight) -> None:
        """x [T, in] -> y [T, out] of the same dtype. The rows of both may be apart."""
        num_rows, in_features = x.shape
        assert in_features == weight.in_features
        assert y.shape == (num_rows, weight.out_features)
        assert y.dtype == x.dtype
        assert y.stride(1) == 1 or weight.out_features == 1
        if x.stride(1) != 1:
            x = x.contiguous()
        self._linear(
            *(self._pool.address, weight.kind, DTYPES[x.dtype]),
            *(x.data_ptr(), x.stride(0), num_rows),
            *(weight.panels.data_ptr(), weight.out_features, in_features),
            None if weight.bias is None else weight.bias.data_ptr(),
            *(y.data_ptr(), y.stride(0)),
        )
