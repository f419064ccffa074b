"""Token embedding of a stack of layers: rows, what adapters change of them, factor, positions."""

import torch

from loraplex.core.adapter import OUTSIDE_LAYERS
from loraplex.kernels.adapter_parts import embed
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.models.batch import ForwardBatch
from loraplex.models.norm import HiddenState, Norm


class Embedding:
    """Gives the state that the first layer of a stack reads."""

    def __init__(
        self,
        kernels: Kernels,
        rows: torch.Tensor,
        packed: PackedLinear | None,
        *,
        factor: float,
        projection: PackedLinear | None,
        norm: Norm,
        positions: torch.Tensor | None,
        is_norm_last: bool,
    ) -> None:
        """rows, packed: see DecoderParameters. positions: table [.., hidden] that is added.

        is_norm_last: whether the norm follows that addition.
        """
        self._kernels = kernels
        self._rows, self._packed = rows, packed
        self._factor = factor
        self._projection = projection
        self._norm = norm
        self._positions = positions
        self._is_norm_last = is_norm_last

    def state(self, batch: ForwardBatch) -> HiddenState:
        kernels, rows = self._kernels, self._rows
        if self._packed is None:
            embedded = kernels.take_rows(rows, batch.token_ids)
        else:
            embedded = kernels.weight_rows(self._packed, batch.token_ids, rows.dtype)
        if batch.lora is not None and batch.lora.arrivals is not None:
            batch.lora.arrivals.wait_for(OUTSIDE_LAYERS)
        if batch.lora is not None and batch.lora.parts:
            embed(embedded, batch.token_ids, batch.lora.parts)
        if self._factor != 1.0:
            kernels.scale(embedded, self._factor)
        if self._projection is not None:
            embedded = kernels.linear(embedded, self._projection)
        # After the factor and the projection: an encoder's rows have the size and scale of layers.
        for first, of_image in batch.encoded:
            embedded[first : first + len(of_image)] = of_image
        if self._positions is None:
            return HiddenState(self._norm.apply(embedded), None)
        if not self._is_norm_last:
            embedded = self._norm.apply(embedded)
        state = HiddenState(embedded, kernels.take_rows(self._positions, batch.positions))
        return HiddenState(self._norm.read(state)[0], None) if self._is_norm_last else state
