"""DoRA factors of a linear layer's outputs, computed in the loader's thread after the read.

y = b + (m / ||W + s B A||) * (W x + s B A x), the norm of each row (arXiv:2402.09353, as PEFT
computes it). W is what the packed base layer computes. With P = W A^T,

    ||W_j + s (B A)_j||^2 = ||W_j||^2 + 2 s B_j . P_j + s^2 B_j (A A^T) B_j^T

in float64: W itself is never unpacked, and its own norms are computed once for all adapters.
"""

import dataclasses

import torch

from loraplex.core.adapter import TargetPart
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.models.base_linears import BaseLinears

Factors = dict[tuple[int, str], torch.Tensor]
"""m / norm of each output, float64, by layer and module."""


def with_factors(
    adapter: HostAdapter, base: BaseLinears, device: torch.device, pool_dtype: torch.dtype
) -> HostAdapter:
    """Return the adapter with its factors, checked against the pool's type.

    Raises as dora_factors, and InvalidAdapterError for values too large for the pool's type.
    """
    factors = dora_factors(adapter, base, device)
    largest = torch.finfo(pool_dtype).max
    for weight in adapter.weights:
        factor = factors.get((weight.target.layer, weight.target.module))
        if factor is None:
            continue
        peak = float(factor.abs().amax())
        if max(peak, peak * float(weight.b.abs().amax())) > largest:
            raise InvalidAdapterError(
                f"DoRA of {weight.target.module}, layer {weight.target.layer}, scales up to "
                f"{peak:g}: too large for {pool_dtype}"
            )
    return dataclasses.replace(adapter, factors=factors)


def dora_factors(adapter: HostAdapter, base: BaseLinears, device: torch.device) -> Factors:
    """Return the factors of every module with a magnitude vector.

    Raises AdapterMismatchError if a row of W + s B A is all zeros.
    """
    magnitudes: dict[tuple[int, str], list[HostPart]] = {}
    for part in sorted(adapter.parts, key=lambda part: part.target.first):
        if part.target.part is TargetPart.FACTOR:
            key = (part.target.layer, part.target.module)
            magnitudes.setdefault(key, []).append(part)
    factors = {}
    for key, pieces in magnitudes.items():
        magnitude = torch.cat([piece.values for piece in pieces]).to(device, torch.float64)
        if pieces[0].is_quotient:
            factors[key] = magnitude
            continue
        weights = [w for w in adapter.weights if (w.target.layer, w.target.module) == key]
        weights.sort(key=lambda weight: weight.target.first)
        factors[key] = magnitude / _row_norms(weights, _own_weight(adapter, key), base, device)
    # After all of them: several ranks compute the norms of one layer together.
    for (layer, module), factor in factors.items():
        if not bool(factor.isfinite().all()):
            row = int(factor.isfinite().logical_not().nonzero()[0])
            raise AdapterMismatchError(
                f"DoRA of {module}, layer {layer}: row {row} of the base's weight with its LoRA "
                "is all zeros, so it has no direction that a magnitude could scale"
            )
    return factors


def _own_weight(adapter: HostAdapter, key: tuple[int, str]) -> torch.Tensor | None:
    """Return [out, in], the adapter's replacement of the base's weight."""
    rows = [
        part.values
        for part in sorted(adapter.parts, key=lambda part: part.target.first)
        if part.target.part is TargetPart.ROWS and (part.target.layer, part.target.module) == key
    ]
    return torch.cat(rows) if rows else None


def _row_norms(
    weights: list[HostWeight],
    own_weight: torch.Tensor | None,
    base: BaseLinears,
    device: torch.device,
) -> torch.Tensor:
    """Return [out] float64, the row norms of W + s B A of one module in pieces of outputs."""
    target = weights[0].target
    a = weights[0].a.to(device, torch.float64)
    b = torch.cat([weight.b for weight in weights]).to(device, torch.float64) * weights[0].scale
    if own_weight is None:
        projected = base.project(target.layer, target.module, a.float()).t()
        squares = base.squared_row_norms(target.layer, target.module)
        gram = base.gram(target.layer, target.module, a)
    else:
        wide = own_weight.to(device, torch.float64)
        projected, squares, gram = wide @ a.t(), wide.square().sum(1), a @ a.t()
    squares = squares + 2 * (b * projected).sum(1) + ((b @ gram) * b).sum(1)
    return squares.clamp_(min=0).sqrt()
