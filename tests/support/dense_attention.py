"""Attention by its formula, in float64, and the inputs of tests of attention kernels."""

from collections.abc import Sequence

import torch

from loraplex.kernels.ops import AttentionShape


def random_queries(
    counts: Sequence[int], shape: AttentionShape, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return the queries of each row, [count, H, D]."""
    return [torch.randn(count, shape.num_heads, shape.head_dim).to(dtype) for count in counts]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None = None,
    sinks: int = 0,
) -> torch.Tensor:
    """float64 [n, H, D]; query [n, H, D] are the last of key, value [L, K, D].

    A query sees `window` positions up to its own, and the first `sinks`.
    """
    positions = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
    keys = torch.arange(len(key))
    hidden = keys > positions
    if window is not None:
        hidden |= (keys <= positions - window) & (keys >= sinks)
    sharing = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(sharing, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[2] ** -0.5
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest expected value."""
    return float((output.double() - expected).abs().max() / expected.abs().max())
