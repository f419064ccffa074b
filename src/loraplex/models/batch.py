"""Tensors of one step, in the form that the decoder reads."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import RowLayout


class RotatedSpan(NamedTuple):
    """Tokens of one row that are rotated for a greater length than their own."""

    first_token: int
    """Index in the batch of the first of them."""
    start: int
    """Its position."""
    num_tokens: int
    length: int


class EncodedRows(NamedTuple):
    """Rows of an encoder that take the place of the embeddings of tokens."""

    first_token: int
    """Index in the batch of the first of them."""
    rows: torch.Tensor  # [n, hidden]


class StateRows(NamedTuple):
    """Whole rows, as recurrences and convolutions need them: with all of their tokens, draft tokens
    included.

    Rows in addition to those of the step have no tokens.
    """

    query_start_loc: torch.Tensor  # [R + 1] int64
    reads: Mapping[CacheGroupId, torch.Tensor]
    """State [R] int64 that each row begins with, by cache group; -1: zero."""
    table_starts: Mapping[CacheGroupId, torch.Tensor]
    """Where each row's table begins [R] int64 among the entries of the block tables of a group."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R rows, one row after another. Everything is on the device.

    What differs by cache group has one entry for each group.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mappings: tuple[torch.Tensor, ...]
    """Place [T] int64 of the token's key and value; in a group of states, the block of the state
    that ends with the token. -1: nothing is written."""
    rows: tuple[RowLayout, ...]
    """Rows with the block tables of each group. In groups of an encoder's positions seq_lens are
    the lengths of the rows' inputs, and a token reads all of its row's."""
    logits_indices: torch.Tensor  # [S] int64: the tokens whose logits are wanted
    lora: LoraBatch | None = None
    """None: no row uses an adapter."""
    rotated_spans: tuple[RotatedSpan, ...] = ()
    encoded: tuple[EncodedRows, ...] = ()
    state_rows: StateRows | None = None
    """None: no cache group is read by whole rows."""
