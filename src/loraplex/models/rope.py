"""Rotary position embedding: the frequencies of every rope type, and the table of angles.

An angle here depends on the request and on the served model, never on the batch, on how a prompt
was cut into chunks, or on what was reused. With two types it depends on a length, too:

- dynamic: the base of the frequencies grows with the length.
- longrope: beyond the original length other factors divide the frequencies.

A position p is rotated for length p + 1, unless `core.plan.RotationBorder` gives its sequence a
greater one: then the first positions are rotated for that one (ADR 32).

Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), the
Llama 3.1 release, and the parameter names of Hugging Face configurations.
"""

import functools
import math
from typing import Final

import torch

from loraplex.core.errors import UnsupportedModelError
from loraplex.core.plan import RotationBorder
from loraplex.models.batch import RotatedSpan
from loraplex.models.rope_config import yarn_mscale
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.part import RopeConfig

_MAX_LENGTHS: Final = 4
"""Lengths whose angles are kept on the host, for the next chunk of the same prompt."""


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
        self._rope = rope
        self._rotary_dim = rotary_dim
        self._trained = max_position_embeddings
        positions = torch.arange(max_model_len, dtype=torch.float32)
        cos, sin = self._angles(positions, positions.double() + 1)
        self.cos = cos.to(device)
        self.sin = sin.to(device)
        self._of_length = functools.lru_cache(_MAX_LENGTHS)(self._angles_of_length)

    def rotate_span(self, cos: torch.Tensor, sin: torch.Tensor, span: RotatedSpan) -> None:
        """Replace the angles of these tokens [T, rotary_dim / 2] by those of the span's length."""
        stop = span.start + span.num_tokens
        tokens = slice(span.first_token, span.first_token + span.num_tokens)
        for angles, source in zip((cos, sin), self._of_length(span.length), strict=True):
            angles[tokens] = source[span.start : stop].to(angles.device)

    def _angles_of_length(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, on the host: position length - 1 has that length by itself."""
        positions = torch.arange(length - 1, dtype=torch.float32)
        return self._angles(positions, torch.full((length - 1,), length, dtype=torch.float64))

    def _angles(
        self, positions: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope, dim = self._rope, self._rotary_dim
        match rope.rope_type:
            case "dynamic":
                frequencies = _dynamic_frequencies(rope, dim, self._trained, lengths)
            case "longrope":
                is_long = (lengths > rope.original_max_position_embeddings).unsqueeze(1)
                short = _divided(rope, dim, rope.short_factor)
                frequencies = torch.where(is_long, _divided(rope, dim, rope.long_factor), short)
            case _:
                frequencies = inverse_frequencies(rope, dim)
        angles = positions.unsqueeze(1) * frequencies
        scale = attention_scale(rope) * _growth(rope, positions)
        return angles.cos() * scale, angles.sin() * scale


def rotation_border(spec: ModelSpec, max_model_len: int) -> RotationBorder | None:
    """Return where the rotation begins to depend on a length; None if no sequence gets there.

    Raises UnsupportedModelError if layers have different borders.
    """
    borders = {_border(rope, spec) for rope in _ropes(spec)} - {None}
    if len(borders) > 1:
        raise UnsupportedModelError(
            "rope types longrope and dynamic with different lengths in one model are not supported"
        )
    border = next(iter(borders), None)
    return None if border is None or border.length >= max_model_len else border


def _border(rope: RopeConfig, spec: ModelSpec) -> RotationBorder | None:
    if rope.rope_type == "dynamic":
        return RotationBorder(spec.max_position_embeddings, by_prompt_length=True)
    if rope.rope_type == "longrope":
        length = rope.original_max_position_embeddings
        return RotationBorder(length, recomputes=rope.recomputes)
    return None


def rotary_tables(
    spec: ModelSpec, max_model_len: int, device: torch.device
) -> dict[RopeConfig, RotaryTable]:
    """Return a table for each rotary embedding of the layers; none if positions are learned."""
    return {
        rope: RotaryTable(
            rope,
            rotary_dim,
            max_position_embeddings=spec.max_position_embeddings,
            max_model_len=max_model_len,
            device=device,
        )
        for rope, rotary_dim in _ropes(spec).items()
    }


def _ropes(spec: ModelSpec) -> dict[RopeConfig, int]:
    """Return the rotary embeddings of all layers, each with its rotary_dim."""
    return {
        rope: rope.rotary_dim(head_dim)
        for layer in spec.layers
        for mixer in layer.mixers
        for rope, head_dim in mixer.ropes().items()
    }


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Radians per position [rotary_dim / 2], float32, of types for which no length counts."""
    match rope.rope_type:
        case "linear":
            return _plain(rope.theta, rotary_dim) / rope.factor
        case "proportional":
            return _proportional(rope, rotary_dim)
        case "yarn":
            return _yarn(rope, rotary_dim)
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
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def _growth(rope: RopeConfig, positions: torch.Tensor) -> torch.Tensor | float:
    """Return RopeConfig.growth's factors [num_positions, 1]."""
    if not rope.growth:
        return 1.0
    steps = ((positions + rope.growth_offset) / rope.original_max_position_embeddings).floor()
    return (1 + rope.growth * (1 + steps).log()).unsqueeze(1)


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / theta ** _exponents(rotary_dim)


def _dynamic_frequencies(
    rope: RopeConfig, dim: int, trained: int, lengths: torch.Tensor
) -> torch.Tensor:
    """NTK-aware scaling [num_lengths, dim / 2]: the base grows beyond the trained length."""
    growth = rope.factor * lengths.clamp(min=trained) / trained - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / base.float().unsqueeze(1) ** _exponents(dim)


def _proportional(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """The first part of the frequencies; the rest of the head is not rotated."""
    num_rotated = int(rope.partial_rotary_factor * rotary_dim // 2)
    frequencies = _plain(rope.theta, rotary_dim) / rope.factor
    frequencies[num_rotated:] = 0.0
    return frequencies


def _divided(rope: RopeConfig, rotary_dim: int, factors: tuple[float, ...]) -> torch.Tensor:
    return 1.0 / (torch.tensor(factors) * rope.theta ** _exponents(rotary_dim))


def _llama3(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones are kept, those between blended."""
    frequencies = _plain(rope.theta, rotary_dim)
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    # Of equal factors (Llama 4) the quotient is infinite, and nothing is blended.
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
