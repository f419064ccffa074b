"""LoRA of the layer whose heads absorbed latent attention takes apart, and its torch reference.

That layer W [heads * (keys + values), latent] is never applied to a latent vector: its keys' rows
bring queries to the latent's space, and its values' rows bring what attention gave out of it. So
its LoRA, W + scale * B A, is a product by head in each of the two places: with B's rows of the
head's keys first and A then, and with A first and B's rows of the head's values then.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from loraplex.kernels.adapter_parts import OutputVector, PartsUse
from loraplex.kernels.host_tensors import tiled_product
from loraplex.kernels.lora import LoraBatch, LoraPlace, vector_uses


class HeadsPlace(NamedTuple):
    """One of the two places in which adapters change such a layer."""

    layer: int
    module: str
    num_heads: int
    key_size: int
    value_size: int
    is_of_keys: bool

    @property
    def span(self) -> slice:
        """Return the outputs of the place among those of a head."""
        return slice(0, self.key_size) if self.is_of_keys else slice(self.key_size, None)

    def outputs(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the place [n, heads, size] of vectors [n, all outputs]."""
        return vectors.view(len(vectors), self.num_heads, -1)[..., self.span]


def add_heads_lora(y: torch.Tensor, x: torch.Tensor, batch: LoraBatch, place: HeadsPlace) -> None:
    """Add what the adapters give to y [T, H, out], for x [T, H, in], in place; see Kernels."""
    table = batch.table
    cell = table.cells.by_place[place.layer, place.module, 0]
    in_features, out_features = table.cells.shapes[cell]
    for group in batch.groups():
        rank, offset = int(table.ranks[group.entry, cell]), int(table.offsets[group.entry, cell])
        if rank == 0:
            continue
        middle = offset + rank * in_features
        a = batch.pool[offset:middle].view(rank, in_features).float()
        b = batch.pool[middle : middle + rank * out_features].view(rank, out_features).float()
        of_heads = place.outputs(b)
        scales = group.token_scales * float(table.scales[group.entry, cell])
        for head in range(place.num_heads):
            first, then = a.t(), of_heads[:, head]
            if place.is_of_keys:
                first, then = then.t(), a
            inputs = x[group.token_indices, head].float()
            reduced = tiled_product(inputs, first) * scales.unsqueeze(1)
            summed = y[group.token_indices, head].float() + tiled_product(reduced, then)
            y[group.token_indices, head] = summed.to(y.dtype)


def scale_heads(x: torch.Tensor, batch: LoraBatch, place: HeadsPlace) -> torch.Tensor:
    """Return x [T, H, size] with what the adapters' output vectors give for it; see Kernels."""
    scaled = x.clone(memory_format=torch.contiguous_format)
    for use, vector in _vectors(batch, place):
        tokens, scales = use.token_indices, use.token_scales.view(-1, 1, 1)
        share = torch.zeros_like(x[tokens], dtype=torch.float32)
        if vector.factor is not None:
            share = x[tokens].float() * place.outputs(vector.factor[None].float())
        # What is added to all keys of a query's head does not change its softmax.
        if vector.shift is not None and not place.is_of_keys:
            share = share + place.outputs(vector.shift[None].float())
        scaled[tokens] = (scaled[tokens].float() + share * scales).to(x.dtype)
    return scaled


def _vectors(batch: LoraBatch, place: HeadsPlace) -> Iterator[tuple[PartsUse, OutputVector]]:
    """Yield the vectors of the layer, each with the tokens that it applies to."""
    named = LoraPlace(place.layer, (place.module,), (0,))
    for use in (*vector_uses(batch, named), *batch.parts):
        for vector in use.parts.vectors.get((place.layer, place.module), ()):
            assert vector.first == 0, "the layer is a module of its own"
            yield use, vector
