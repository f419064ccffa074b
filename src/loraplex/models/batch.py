"""Tensors of one step, in the form that the decoder reads."""

import dataclasses
from typing import NamedTuple

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.row_layout import RowLayout


class RotatedSpan(NamedTuple):
    """Tokens of one row that are rotated for a greater length than their own."""

    first_token: int
    """Index in the batch of the first of them."""
    start: int
    """Its position."""
    num_tokens: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows, one row after another. Everything is on the device.

    What differs by KV group has one entry for each group.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mappings: tuple[torch.Tensor, ...]  # [T] int64: where the token's key and value go
    rows: tuple[RowLayout, ...]
    """Rows with the block tables of each group."""
    logits_indices: torch.Tensor  # [S] int64: the tokens whose logits are wanted
    lora: LoraBatch | None = None
    """None: no row uses an adapter."""
    rotated_spans: tuple[RotatedSpan, ...] = ()
