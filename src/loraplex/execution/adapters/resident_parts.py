"""Parts of an adapter other than LoRA, as views of the pool for the kernels."""

from collections.abc import Sequence

import torch

from loraplex.core.adapter import EMBEDDING, LM_HEAD, LoraTarget, TargetPart
from loraplex.execution.adapters.host_adapters import HostPart
from loraplex.kernels.adapter_parts import (
    AdapterParts,
    EmbeddingLora,
    OutputVector,
    TokenRows,
    WeightRows,
)

_TWINS = {EMBEDDING: LM_HEAD, LM_HEAD: EMBEDDING}


class PartsViews:
    """Builder of one adapter's parts: `add` its pieces in order, then take the `result`."""

    def __init__(self, *, ties_embeddings: bool) -> None:
        self._ties_embeddings = ties_embeddings
        self._vectors: dict[tuple[int, str], list[OutputVector]] = {}
        self._rows: dict[tuple[str, TargetPart], list[WeightRows]] = {}
        self._token_ids: dict[str, list[torch.Tensor]] = {}
        self._shared: set[str] = set()
        self._embedding_scale = 1.0

    def add(self, part: HostPart, place: torch.Tensor) -> None:
        """Add a piece. place: its own flat elements of the pool, which may be written later."""
        target = part.target
        view = place.view(target.rank, target.out_features)
        match target.part:
            case TargetPart.FACTOR:
                shift = view[1] if target.rank == 2 else None
                self._add_vector(target, OutputVector(target.first, view[0], shift))
                return
            case TargetPart.BIAS | TargetPart.SHIFT:
                self._add_vector(target, OutputVector(target.first, None, view[0]))
                return
            case TargetPart.TOKENS:
                assert part.indices is not None
                self._token_ids.setdefault(target.module, []).append(part.indices)
            case TargetPart.EMBEDDING_A:
                self._embedding_scale = part.scale
        if part.is_base:
            self._shared.add(target.module)
        pieces = self._rows.setdefault((target.module, target.part), [])
        pieces.append(WeightRows(target.first, view))

    def result(self, *, has_head_lora: bool) -> AdapterParts:
        """Return the parts. Token rows are read and must have been written."""
        weights = self._whole_weights()
        return AdapterParts(
            vectors=self._vectors,
            weights=weights,
            tokens=self._tokens(),
            embedding_lora=self._embedding_lora(),
            has_head_lora=has_head_lora,
        )

    def _add_vector(self, target: LoraTarget, vector: OutputVector) -> None:
        self._vectors.setdefault((target.layer, target.module), []).append(vector)

    def _whole_weights(self) -> dict[str, tuple[WeightRows, ...]]:
        """Return whole weights; a copy of the base's parameter also replaces the tied one."""
        weights = {
            module: _in_order(pieces)
            for (module, part), pieces in self._rows.items()
            if part is TargetPart.ROWS
        }
        if self._ties_embeddings:
            for module in self._shared:
                weights.setdefault(_TWINS[module], weights[module])
        return weights

    def _tokens(self) -> dict[str, TokenRows]:
        """Return trained tokens; those of an embedding also change a tied lm_head, as in PEFT."""
        tokens = {
            module: _sorted_tokens(indices, self._rows[module, TargetPart.TOKENS])
            for module, indices in self._token_ids.items()
        }
        if self._ties_embeddings and EMBEDDING in tokens:
            tokens.setdefault(LM_HEAD, tokens[EMBEDDING])
        return tokens

    def _embedding_lora(self) -> EmbeddingLora | None:
        a = self._rows.get((EMBEDDING, TargetPart.EMBEDDING_A))
        if a is None:
            return None
        (b,) = self._rows[EMBEDDING, TargetPart.EMBEDDING_B]
        return EmbeddingLora(_in_order(a), b.rows, self._embedding_scale)


def _sorted_tokens(indices: Sequence[torch.Tensor], pieces: Sequence[WeightRows]) -> TokenRows:
    """Concatenate token rows, sorted by token id."""
    token_ids, order = torch.cat(list(indices)).sort()
    rows = torch.cat([piece.rows for piece in pieces])[order.to(pieces[0].rows.device)]
    return TokenRows(token_ids.to(rows.device), rows)


def _in_order(pieces: Sequence[WeightRows]) -> tuple[WeightRows, ...]:
    """Sort a matrix's pieces by their first row: targets are placed in another order."""
    return tuple(sorted(pieces, key=lambda piece: piece.first))
