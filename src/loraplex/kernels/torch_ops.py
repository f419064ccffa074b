"""Torch's ops in place of some of a backend's own, such as those that a check found wrong."""

import dataclasses
from collections.abc import Iterable
from typing import Final

import torch

from loraplex.kernels.channel import Channel
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    Kernels,
    RowLayout,
    Storage,
)
from loraplex.kernels.reference import ReferenceKernels

RECORDED_STEPS: Final = "repeat"
"""Op that stands for recorded steps."""

_SHARING_A_FORM: Final = (
    frozenset(
        (
            *("pack_linear", "takes_quantized", "pack_blocks", "weight_rows", "packed_layout"),
            *("linear_parts", "join_linear", "linear", "linear_apart", "squared_row_norms"),
            "grouped_linear",
        )
    ),
    frozenset(("allocate_kv", "write_kv", "plan_attention", "paged_attention")),
    frozenset(("plan_latent_attention", "latent_attention")),
    frozenset((RECORDED_STEPS, "recording", "forget_recorded")),
)
"""Ops that read and write one opaque form of a backend: none of them is replaced alone."""


def with_partners(ops: Iterable[str]) -> frozenset[str]:
    """Return the ops, and all that share a form with one of them."""
    found = frozenset(ops)
    for together in _SHARING_A_FORM:
        if found & together:
            found |= together
    return found


def replace_ops(kernels: Kernels, torch_ops: ReferenceKernels, ops: Iterable[str]) -> None:
    """Let a backend compute these ops, and their partners, by torch. Before anything is packed."""
    for name in with_partners(ops):
        setattr(kernels, name, getattr(torch_ops, name))


class TorchOps(ReferenceKernels):
    """Implements `Kernels` for steps as a backend of any device has them.

    An accelerator's rows are on the device alone, and its padding is written nowhere.
    """

    def __init__(self, device: torch.device, channel: Channel | None = None) -> None:
        super().__init__(device, channel)

    def write_kv(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        is_kept = slot_mapping >= 0
        super().write_kv(storage, key[is_kept], value[is_kept], slot_mapping[is_kept])

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        return super().plan_attention(_with_tables(rows), shape, rules)

    def plan_latent_attention(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> AttentionPlan:
        return super().plan_latent_attention(_with_tables(rows), shape, rules)


def _with_tables(rows: RowLayout) -> RowLayout:
    """Return the rows with the tables that a device has, by row."""
    if rows.on_device is None:
        return rows
    on_device, num_rows = rows.on_device, len(rows.seq_lens)
    tables = on_device.block_tables[on_device.table_rows[:num_rows].long()].long()
    return dataclasses.replace(rows, block_tables=tables, on_device=None)
