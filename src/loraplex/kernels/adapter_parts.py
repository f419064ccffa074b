"""Adapters' changes in addition to LoRA: biases, DoRA's factors, rows of embedding and lm_head.

Works on views of the adapter pool. With a request's scale t the change is t times as large: a copy
of scale 1 takes the base's place exactly. Everything is computed for a token by itself, in float32.

Output vectors (DoRA's factors, biases) may have places in a LoraTable. A backend that reads the
table on its device applies them in its kernels of LoRA, so that a step with such adapters is the
recorded step of any adapters. A cell has up to MAX_VECTORS words, in the
order in which the vectors are applied; zeros follow. A word is a vector's first element in the
pool, in units of the table's alignment, times FLAGS, plus FACTOR, SHIFT or both; of both the shift
follows the factor.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.adapter import EMBEDDING, LM_HEAD, OUTSIDE_LAYERS, SCORE
from loraplex.kernels.host_tensors import tiled_product


class OutputVector(NamedTuple):
    """A linear layer's outputs from `first` on get factor * y + shift more. None is zero."""

    first: int
    factor: torch.Tensor | None  # [n]
    shift: torch.Tensor | None  # [n]

    @property
    def size(self) -> int:
        """Number of outputs."""
        return next(len(part) for part in (self.factor, self.shift) if part is not None)


class WeightRows(NamedTuple):
    """Neighbouring rows of a matrix."""

    first: int
    rows: torch.Tensor  # [n, columns]


class TokenRows(NamedTuple):
    """Rows of single tokens."""

    token_ids: torch.Tensor  # [n] int64, ascending
    rows: torch.Tensor  # [n, hidden]


class EmbeddingLora(NamedTuple):
    """x += scale * A[:, token] B^T."""

    a: tuple[WeightRows, ...]  # of A transposed: [vocab, rank]
    b: torch.Tensor  # [rank, hidden]
    scale: float


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterParts:
    """Parts of one adapter in the pool: views of it, except for the few rows of single tokens."""

    vectors: dict[tuple[int, str], list[OutputVector]] = dataclasses.field(default_factory=dict)
    """Vectors by layer and module."""
    weights: dict[str, tuple[WeightRows, ...]] = dataclasses.field(default_factory=dict)
    """Whole copies of embed_tokens and heads: equally many rows each, but for the last."""
    tokens: dict[str, TokenRows] = dataclasses.field(default_factory=dict)
    """Rows of single tokens, of embed_tokens and lm_head."""
    embedding_lora: EmbeddingLora | None = None
    has_head_lora: bool = False

    @property
    def changes_ends(self) -> bool:
        """Whether it changes the embedding or lm_head, and not only layers."""
        return bool(
            self.weights.keys() - {SCORE}
            or self.tokens
            or self.embedding_lora is not None
            or self.has_head_lora
            or any(layer == OUTSIDE_LAYERS for layer, _ in self.vectors)
        )


class PartsUse(NamedTuple):
    """The tokens of a step that one adapter applies to."""

    parts: AdapterParts
    token_indices: torch.Tensor  # [n] int64
    token_scales: torch.Tensor  # [n] float32


def add_vectors(
    y: torch.Tensor,
    uses: Sequence[PartsUse],
    layer: int,
    modules: Sequence[str],
    out_offsets: Sequence[int],
) -> None:
    """Scale and shift the outputs y of a fused linear layer, in place: before LoRA is added.

    The columns of modules[i] begin at out_offsets[i]. Where several adapters apply to a token, each
    one's share is of the base's own output.
    """
    shares = []
    for use in uses:
        for module, offset in zip(modules, out_offsets, strict=True):
            for vector in use.parts.vectors.get((layer, module), ()):
                columns = _columns(y, offset, vector)
                share = _share(columns[use.token_indices].float(), vector)
                shares.append((columns, use, share * use.token_scales.unsqueeze(1)))
    for columns, use, share in shares:
        summed = columns[use.token_indices].float() + share
        columns[use.token_indices] = summed.to(y.dtype)


def embed(x: torch.Tensor, token_ids: torch.Tensor, uses: Sequence[PartsUse]) -> None:
    """Change the base's embeddings x [T, hidden] of token_ids [T], in place."""
    for use in uses:
        parts = use.parts
        rows, tokens = parts.weights.get(EMBEDDING), parts.tokens.get(EMBEDDING)
        if rows is None and tokens is None and parts.embedding_lora is None:
            continue
        ids = token_ids[use.token_indices]
        scales = use.token_scales.unsqueeze(1)
        base = x[use.token_indices].float()
        own = base if rows is None else _gather(rows, ids)
        if tokens is not None:
            own = _with_tokens(own, ids, tokens)
        changed = torch.lerp(base, own, scales)
        if parts.embedding_lora is not None:
            lora = parts.embedding_lora
            reduced = _gather(lora.a, ids) * (scales * lora.scale)
            changed = changed + tiled_product(reduced, lora.b.float())
        x[use.token_indices] = changed.to(x.dtype)


def replace_logits(y: torch.Tensor, x: torch.Tensor, uses: Sequence[PartsUse]) -> None:
    """Put what whole or single rows of lm_head give for x [S, hidden] into y [S, vocab]."""
    for use in uses:
        rows, tokens = use.parts.weights.get(LM_HEAD), use.parts.tokens.get(LM_HEAD)
        if rows is None and tokens is None:
            continue
        inputs = x[use.token_indices].float()
        scales = use.token_scales.unsqueeze(1)
        for piece in rows or ():
            columns = y[:, piece.first : piece.first + len(piece.rows)]
            own = tiled_product(inputs, piece.rows.float().t())
            base = columns[use.token_indices].float()
            columns[use.token_indices] = torch.lerp(base, own, scales).to(y.dtype)
        if tokens is not None:
            places = (use.token_indices.unsqueeze(1), tokens.token_ids.unsqueeze(0))
            own = tiled_product(inputs, tokens.rows.float().t())
            y[places] = torch.lerp(y[places].float(), own, scales).to(y.dtype)


def scores(base: torch.Tensor, x: torch.Tensor, uses: Sequence[PartsUse]) -> list[torch.Tensor]:
    """Return what classification heads give for each row of x [S, hidden]: float32 [labels].

    base: scores [S, labels] of the base model's head, without columns if it has none. The head of
    an adapter changes those of the base if it has equally many labels; any other one takes their
    place whatever the scale, since there is nothing of which it could be a share.
    """
    found = list(base)
    for use in uses:
        pieces = use.parts.weights.get(SCORE)
        if pieces is None:
            continue
        inputs = x[use.token_indices].float()
        own = torch.cat([tiled_product(inputs, piece.rows.float().t()) for piece in pieces], 1)
        if own.shape[1] == base.shape[1]:
            own = torch.lerp(base[use.token_indices], own, use.token_scales.unsqueeze(1))
        for index, values in zip(use.token_indices.tolist(), own, strict=True):
            found[index] = values
    return found


def of_rows(uses: Sequence[PartsUse], places: torch.Tensor) -> tuple[PartsUse, ...]:
    """Return the uses of the chosen rows. places [T]: the chosen row of each token, or -1."""
    chosen = []
    for use in uses:
        rows = places[use.token_indices]
        is_chosen = rows >= 0
        chosen.append(PartsUse(use.parts, rows[is_chosen], use.token_scales[is_chosen]))
    return tuple(use for use in chosen if len(use.token_indices))


def _columns(y: torch.Tensor, offset: int, vector: OutputVector) -> torch.Tensor:
    first = offset + vector.first
    return y[:, first : first + vector.size]


def _share(base: torch.Tensor, vector: OutputVector) -> torch.Tensor:
    """float32 [n, outputs]"""
    share = torch.zeros_like(base)
    if vector.factor is not None:
        share = base * vector.factor.float()
    return share if vector.shift is None else share + vector.shift.float()


def _gather(pieces: Sequence[WeightRows], ids: torch.Tensor) -> torch.Tensor:
    """float32 [n, columns]: rows `ids` of the matrix that the pieces make up."""
    found = pieces[0].rows[ids.clamp(max=len(pieces[0].rows) - 1)].float()
    # Every piece is read for all ids: to find out which it has, a host would wait for a device.
    for piece in pieces[1:]:
        places = (ids - piece.first).clamp(0, len(piece.rows) - 1)
        is_later = (ids >= piece.first).unsqueeze(1)
        found = torch.where(is_later, piece.rows[places].float(), found)
    return found


def _with_tokens(rows: torch.Tensor, ids: torch.Tensor, tokens: TokenRows) -> torch.Tensor:
    """rows [n, hidden], with the trained tokens' own in their places."""
    places = torch.searchsorted(tokens.token_ids, ids).clamp_(max=len(tokens.token_ids) - 1)
    is_trained = (tokens.token_ids[places] == ids).unsqueeze(1)
    return torch.where(is_trained, tokens.rows[places].float(), rows)


MAX_VECTORS = 3
"""Vectors of a linear layer: a bias, DoRA's factor, and a bias of lora_B."""

SHIFT = 1
FACTOR = 2
FLAGS = 4


def vectors_at(
    words: npt.NDArray[np.int32], pool: torch.Tensor, out_features: int, alignment: int
) -> list[OutputVector]:
    """Return the vectors of a cell, [out_features] each: views of the pool."""
    vectors = []
    for word in words[words > 0].tolist():
        first, flags = word // FLAGS * alignment, word % FLAGS
        size = out_features * (2 if flags == FACTOR | SHIFT else 1)
        rows = pool[first : first + size].view(-1, out_features)
        factor = rows[0] if flags & FACTOR else None
        vectors.append(OutputVector(0, factor, rows[-1] if flags & SHIFT else None))
    return vectors
