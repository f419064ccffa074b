"""Size of a model's weights once they are loaded, from its specification alone.

Kernels pad what they pack, so the truth is a little more.
"""

import math

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.ops import PackedLinear
from loraplex.kernels.quantization import group_size_of
from loraplex.models.parameters import LinearPlace, build_parameters
from loraplex.models.spec import ModelSpec
from loraplex.models.stored_format import StoredFormat, StoredMethod, refuse_second_quantization

_SCALE_BYTES = 4
_BITS = {WeightPrecision.INT8: 8, WeightPrecision.INT4: 4, WeightPrecision.FP8: 8}


def weights_size(spec: ModelSpec, dtype: torch.dtype, precision: WeightPrecision) -> int:
    """Return bytes; about, if the weights are stored quantised.

    Raises ConfigError if a layer cannot be quantised like this.
    """
    stored = spec.stored_format
    refuse_second_quantization(stored, precision)
    form = WeightFormat(dtype=dtype, precision=precision)
    sizes = _WeightSizes(form, stored)
    build_parameters(spec, sizes)
    vector_layers = spec.vector_layers if spec.is_last_stage else ()
    return sizes.num_bytes + sum(layer.num_bytes for layer in vector_layers)


def taken_apart_bytes(place: LinearPlace, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's weight that a mixer keeps cut by heads, too; 0 for others."""
    return math.prod(place.shape) * dtype.itemsize if place.is_taken_apart else 0


class _WeightSizes:
    """ParameterSource that returns nothing and adds up the requested sizes."""

    def __init__(self, form: WeightFormat, stored: StoredFormat | None) -> None:
        self._form = form
        self._stored = stored
        self.num_bytes = 0

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        del name
        tensor = torch.empty(shape, device="meta")[:num_rows]
        self.num_bytes += tensor.numel() * self._form.dtype.itemsize
        return tensor

    def linear(self, place: LinearPlace) -> PackedLinear:
        is_native = self._stored is None and self._form.precision is WeightPrecision.NATIVE
        if place.is_embedding and not (place.is_lm_head and is_native):
            return None  # at most its tensor: not every backend keeps the packed form
        precision = self._form.precision_of(place)
        num_outputs, num_inputs = place.shape
        num_outputs *= place.num_experts or 1
        stored = (
            None if self._stored is None else stored_bits(self._stored, place, self._form.dtype)
        )
        bits = stored or _BITS.get(precision, 8 * self._form.dtype.itemsize)
        self.num_bytes += int(num_outputs * num_inputs * bits) // 8
        try:
            block = num_inputs // max(1, place.num_blocks)
            group_size = group_size_of(precision, block)
        except ConfigError as error:
            raise ConfigError(f"{place.name}: {error.message}", param="quantization") from error
        if group_size:
            self.num_bytes += (
                num_outputs * num_inputs // block * math.ceil(block / group_size) * _SCALE_BYTES
            )
        if place.has_bias:
            self.num_bytes += num_outputs * self._form.dtype.itemsize
        self.num_bytes += taken_apart_bytes(place, self._form.dtype)
        return place


def stored_bits(stored: StoredFormat, place: LinearPlace, dtype: torch.dtype) -> float | None:
    """Return the bits of a weight that is stored quantised; None: it is not, or is widened."""
    if place.is_choice or place.has_unit_rows:
        return None
    if place.is_lm_head and stored.method is not StoredMethod.GGUF:
        return None
    if stored.has_experts_alone and not place.num_experts:
        return None
    return stored.bits_in(str(dtype).removeprefix("torch."))
