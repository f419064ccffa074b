"""Quantised weight in one form for all formats: codes, and what turns them into numbers.

Formulas: (code - zero) * scale for integers, table[code] * scale for types with a table,
code * scale - offset for GGUF's blocks that have a minimum.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from loraplex.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredWeight:
    """Weight [..., out, in], whose inputs share scales in groups.

    Axes in front, if any, count experts.
    """

    codes: torch.Tensor
    """[..., out, in] uint8 or int8, or float8_e4m3fn."""
    scales: torch.Tensor
    """[..., out, groups] float32."""
    group_size: int
    """Inputs that share a scale; the last group may be shorter."""
    bits: int
    """Bits of a code."""
    zeros: torch.Tensor | None = None
    """[..., out, groups] of the codes' type; None: 0."""
    offsets: torch.Tensor | None = None
    """[..., out, groups] float32, subtracted at the end; None: 0."""
    table: torch.Tensor | None = None
    """[2 ** bits] float32, number of each code; None: the code itself."""
    groups_of_inputs: torch.Tensor | None = None
    """Group of each input: [in] int64; None: input i has group i // group_size."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def decoded(self) -> torch.Tensor:
        """Return the numbers [..., out, in] float32, unrounded but for the product itself."""
        numbers = self.table[self.codes.int()] if self.table is not None else self.codes.float()
        if self.zeros is not None:
            numbers -= self._spread(self.zeros.float())
        numbers *= self._spread(self.scales)
        if self.offsets is not None:
            numbers -= self._spread(self.offsets)
        return numbers

    def rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "StoredWeight":
        """Return what `choose` takes of the axes in front of the last one."""
        return dataclasses.replace(
            self,
            codes=choose(self.codes),
            scales=choose(self.scales),
            zeros=None if self.zeros is None else choose(self.zeros),
            offsets=None if self.offsets is None else choose(self.offsets),
        )

    def inputs(self, first: int, end: int) -> "StoredWeight":
        """Return the weight of the inputs from first to end - 1."""
        codes = self.codes[..., first:end]
        if self.groups_of_inputs is not None:
            groups = self.groups_of_inputs[first:end]
            return dataclasses.replace(self, codes=codes, groups_of_inputs=groups)
        if self.scales.shape[-1] == 1:
            return dataclasses.replace(self, codes=codes, group_size=max(1, end - first))
        size = math.gcd(self.group_size, first)

        def own(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return None
            fine = values.repeat_interleave(self.group_size // size, -1)
            return fine[..., first // size : -(-end // size)]

        scales = own(self.scales)
        assert scales is not None
        return dataclasses.replace(
            self,
            codes=codes,
            scales=scales,
            zeros=own(self.zeros),
            offsets=own(self.offsets),
            group_size=size,
        )

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return a value for each input from one for each group."""
        num_inputs = self.shape[-1]
        if self.groups_of_inputs is not None:
            return values[..., self.groups_of_inputs]
        if values.shape[-1] == 1:
            return values
        return values.repeat_interleave(self.group_size, -1)[..., :num_inputs]

    def checked(self, name: str) -> "StoredWeight":
        """Return itself. Raises ConfigError, which has the name, if a part does not fit."""
        groups = self.scales.shape[-1]
        for part, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tensor.shape != (*self.shape[:-1], groups):
                raise ConfigError(
                    f"{name}: its {part} have shape {list(tensor.shape)}, "
                    f"{[*self.shape[:-1], groups]} is meant"
                )
        if self.groups_of_inputs is None:
            if groups != -(-self.shape[-1] // self.group_size):
                raise ConfigError(
                    f"{name}: {groups} scales for {self.shape[-1]} inputs in groups of "
                    f"{self.group_size}"
                )
        elif self.groups_of_inputs.shape != self.shape[-1:] or not bool(
            ((self.groups_of_inputs >= 0) & (self.groups_of_inputs < groups)).all()
        ):
            raise ConfigError(f"{name}: the groups of its inputs must be one of 0 to {groups - 1}")
        if not bool(self.scales.isfinite().all()):
            raise ConfigError(f"{name}: a scale is infinite or no number")
        if self.codes.dtype is torch.float8_e4m3fn and bool(self.codes.float().isnan().any()):
            raise ConfigError(f"{name}: a weight is no number")
        return self


def group_size(num_inputs: int, num_groups: int, name: str) -> int:
    """Return the size of equal groups. Raises ConfigError if they do not divide the inputs."""
    if num_groups < 1 or num_inputs % num_groups:
        raise ConfigError(f"{name}: {num_inputs} inputs cannot have {num_groups} equal groups")
    return num_inputs // num_groups


def groups_in_order(stored: torch.Tensor | None, num_inputs: int, size: int) -> torch.Tensor | None:
    """Return the stored group of each input; None where groups are neighbouring inputs."""
    if stored is None:
        return None
    groups = stored.flatten().long()
    return None if torch.equal(groups, torch.arange(num_inputs) // size) else groups
