"""One head's key or value of one token as the KV storage of the torch reference holds it.

A float vector is stored as it is. An int8 vector has a scale of its own after its D numbers: four
bytes, a float32. An element is number * scale (native/include/loraplex/attention.h).
"""

import torch

SCALE_BYTES = 4
_LARGEST_NUMBER = 127.0


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a stored vector."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] -> [..., stored_size] of the dtype."""
    if dtype != torch.int8:
        return vectors.to(dtype)
    wide = vectors.float()
    scales = wide.abs().amax(-1, keepdim=True) / _LARGEST_NUMBER
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    numbers = torch.where(scales > 0, torch.round(wide / scales), 0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def from_stored(stored: torch.Tensor) -> torch.Tensor:
    """[..., stored_size] -> [..., D] float32."""
    if stored.dtype != torch.int8:
        return stored.float()
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float() * scales
