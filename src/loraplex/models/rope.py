"""Rotary position embedding: the frequencies of every rope type, and the table of angles.

An angle here depends on the position and on the served model only, never on the batch, on how a
prompt was cut into chunks, or on what was reused. Two types are defined otherwise elsewhere:

- dynamic: transformers rescales all positions by the length of the longest sequence so far. Here
  position p is rescaled for length p + 1: the same up to max_position_embeddings, and the same as
  transformers generating token by token beyond it; a prompt that is itself longer differs.
- longrope: transformers takes the short or the long factors by the present length. Here the
  served max_model_len decides once: a server limited to the original length uses the short ones.

Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), the
Llama 3.1 release, and the parameter names of Hugging Face configurations.
"""

import math

import torch

from loraplex.models.spec import ModelSpec, RopeConfig


class RotaryTable:
    """Cosines and sines of all positions [max_model_len, rotary_dim / 2], float32.

    A table, since a cosine computed anew may differ in its last bit with its place in a batch.
    """

    def __init__(
        self,
        rope: RopeConfig,
        rotary_dim: int,
        *,
        max_position_embeddings: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        if rope.rope_type == "dynamic":
            frequencies = _dynamic_frequencies(rope, rotary_dim, max_position_embeddings, positions)
        else:
            frequencies = inverse_frequencies(rope, rotary_dim, max_model_len)
        angles = positions.unsqueeze(1) * frequencies
        scale = attention_scale(rope)
        self.cos = (angles.cos() * scale).to(device)
        self.sin = (angles.sin() * scale).to(device)


def rotary_tables(
    spec: ModelSpec, max_model_len: int, device: torch.device
) -> dict[RopeConfig, RotaryTable]:
    """Return a table for each rotary embedding of the layers; none if positions are learned."""
    rotary_dims = {
        rope: rope.rotary_dim(layer.attention.head_dim)
        for layer in spec.layers
        if (rope := layer.attention.rope) is not None
    }
    return {
        rope: RotaryTable(
            rope,
            rotary_dim,
            max_position_embeddings=spec.max_position_embeddings,
            max_model_len=max_model_len,
            device=device,
        )
        for rope, rotary_dim in rotary_dims.items()
    }


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> torch.Tensor:
    """Radians per position [rotary_dim / 2], float32, of every type but dynamic."""
    match rope.rope_type:
        case "linear":
            return _plain(rope.theta, rotary_dim) / rope.factor
        case "proportional":
            return _proportional(rope, rotary_dim)
        case "yarn":
            return _yarn(rope, rotary_dim)
        case "longrope":
            return _longrope(rope, rotary_dim, max_model_len)
        case "llama3":
            return _llama3(rope, rotary_dim)
    assert rope.rope_type == "default", rope.rope_type
    return _plain(rope.theta, rotary_dim)


def attention_scale(rope: RopeConfig) -> float:
    """What yarn and longrope multiply cosines and sines with; 1 for the other types."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(
            1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings)
        )
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    return _yarn_mscale(rope.factor, 1.0)


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** _exponents(rotary_dim)


def _dynamic_frequencies(
    rope: RopeConfig, dim: int, trained: int, positions: torch.Tensor
) -> torch.Tensor:
    """NTK-aware scaling [num_positions, dim / 2]: the base grows beyond the trained length."""
    length = (positions.double() + 1).clamp(min=trained)
    growth = rope.factor * length / trained - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / base.float().unsqueeze(1) ** _exponents(dim)


def _proportional(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """The first part of the frequencies; the rest of the head is not rotated."""
    num_rotated = int(rope.partial_rotary_factor * rotary_dim // 2)
    frequencies = _plain(rope.theta, rotary_dim) / rope.factor
    frequencies[num_rotated:] = 0.0
    return frequencies


def _longrope(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> torch.Tensor:
    is_long = max_model_len > rope.original_max_position_embeddings
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor)
    return 1.0 / (factors * rope.theta ** _exponents(rotary_dim))


def _llama3(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones are kept, those between blended."""
    frequencies = _plain(rope.theta, rotary_dim)
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Blend of the plain frequencies and those divided by the factor, over a ramp of dimensions."""
    frequencies = _plain(rope.theta, rotary_dim)
    low, high = _yarn_range(rope, rotary_dim)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)


def _yarn_range(rope: RopeConfig, rotary_dim: int) -> tuple[float, float]:
    low = _yarn_dimension(rope, rotary_dim, rope.beta_fast)
    high = _yarn_dimension(rope, rotary_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_dimension(rope: RopeConfig, rotary_dim: int, num_turns: float) -> float:
    """The dimension whose frequency turns num_turns times within the original length."""
    wavelength = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
