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
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Sequence[float] = (),
    sink_logits: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """float64 [n, H, D]; query [n, H, D] are the last of key, value [L, K, D].

    A query sees `window` positions up to its own, and the first `sinks`; if not causal, as many
    later ones, too. Scores are computed as
    AttentionRules describes; without a scale by D ** -0.5.
    """
    positions = torch.arange(len(key) - len(query), len(key)).unsqueeze(1)
    keys = torch.arange(len(key))
    hidden = keys > positions if is_causal else torch.zeros(1, 1, dtype=torch.bool)
    if window is not None and not is_causal:
        hidden = hidden | (keys >= positions + window)
    if window is not None:
        hidden |= (keys <= positions - window) & (keys >= sinks)
    sharing = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(sharing, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key)
    scores *= query.shape[2] ** -0.5 if scale is None else scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes:
        slopes = torch.tensor(alibi_slopes, dtype=torch.float64).view(-1, 1, 1)
        scores += slopes * (keys - positions)
    if position_bias is not None:
        most = position_bias.shape[1] // 2
        scores += position_bias.double()[:, (keys - positions).clamp(-most, most) + most]
    scores.masked_fill_(hidden, -torch.inf)
    if sink_logits is not None:
        sink_scores = sink_logits.double().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat((scores, sink_scores), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest expected value."""
    return float((output.double() - expected).abs().max() / expected.abs().max())
