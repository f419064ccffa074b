"""Rows of a step: where their queries and their keys are."""

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRows:
    """A RowLayout as an accelerator reads it, at addresses that stay.

    There may be more rows than those of the layout, up to the number of a recorded step: they have
    no tokens, and seq_lens 0.
    """

    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    table_rows: torch.Tensor  # [R] int32: the row's table is block_tables[table_rows[r]]
    block_tables: torch.Tensor  # [any, max blocks] int32


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows' queries and keys are.

    Row r computes the tokens query_start_loc[r] .. query_start_loc[r + 1] - 1, which are the last
    of its seq_lens[r] positions. Position p lies in block block_tables[r, p // block_size].
    """

    query_start_loc: Sequence[int]  # R + 1, on the host
    seq_lens: Sequence[int]  # R, on the host
    block_tables: torch.Tensor  # [R, max blocks] int64, on the device; unseen entries are any block
    on_device: DeviceRows | None = None
    """The rows for a backend that reads them there; then `block_tables` may be empty."""

    @property
    def num_device_rows(self) -> int | None:
        """Number of rows, with those that have no tokens; None if they are not on the device."""
        return None if self.on_device is None else self.on_device.seq_lens.shape[0]
