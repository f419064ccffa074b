"""Quantised weight in one form for all formats: codes, and what turns them into numbers.

Formulas: (code - zero) * scale for integers, table[code] * scale for types with a table,
code * scale - offset for GGUF's blocks that have a minimum.

A scheme is what a format's tensors are called, and the function that joins those of one layer. In a
bit string value k is the bits bk to bk + b - 1.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.quantization import SUPER_BLOCK, ScaleLevels
from loraplex.models.config_fields import ConfigFields

_WORD_BITS = 32


def unpacked(words: torch.Tensor, bits: int, dim: int, num_values: int) -> torch.Tensor:
    """Return the first num_values codes along `dim`, as uint8. words: int32, bits: 1 to 8."""
    words = words.movedim(dim, -1)
    # 32 codes fill `bits` words, whatever their size.
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    rounds = words.reshape(*words.shape[:-1], -1, bits)
    codes = torch.empty((*rounds.shape[:-1], _WORD_BITS), dtype=torch.uint8)
    for index in range(_WORD_BITS):
        word, shift = divmod(index * bits, _WORD_BITS)
        low_bits = min(bits, _WORD_BITS - shift)
        code = (rounds[..., word] >> shift) & ((1 << low_bits) - 1)
        if low_bits < bits:
            code |= (rounds[..., word + 1] & ((1 << (bits - low_bits)) - 1)) << low_bits
        codes[..., index] = code.to(torch.uint8)
    return codes.flatten(-2)[..., :num_values].movedim(-1, dim)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of codes along the last axis: [..., n] uint8 -> [..., num_words] int32."""
    num_values = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -num_values % _WORD_BITS))
    rounds = codes.reshape(*codes.shape[:-1], -1, _WORD_BITS).int()
    words = torch.zeros((*rounds.shape[:-1], bits), dtype=torch.int32)
    for index in range(_WORD_BITS):
        word, shift = divmod(index * bits, _WORD_BITS)
        words[..., word] |= rounds[..., index] << shift
        if shift + bits > _WORD_BITS:
            words[..., word + 1] |= rounds[..., index] >> (_WORD_BITS - shift)
    return words.flatten(-2)[..., : num_words(num_values, bits)].contiguous()


def num_words(num_values: int, bits: int) -> int:
    """Return how many words so many codes take."""
    return -(-num_values * bits // _WORD_BITS)


def bits_of(words: int, num_values: int) -> int | None:
    """Return how many bits each of num_values codes in so many words has; None: no number fits."""
    return next((bits for bits in range(1, 9) if num_words(num_values, bits) == words), None)


def nibbles(packed: torch.Tensor, *, low_first: bool) -> torch.Tensor:
    """Return the two codes of each byte along the last axis: [..., n] uint8 -> [..., 2 n]."""
    low, high = packed & 15, packed >> 4
    return torch.stack((low, high) if low_first else (high, low), dim=-1).flatten(-2)


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
    has_byte_inputs: bool = False
    """Whether the format's own reader rounds inputs to 8 bits, in groups like the weight's."""
    levels: ScaleLevels | None = None
    """What scales and offsets are products of, where the format has two levels of them."""

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
            levels=None if self.levels is None else self.levels.mapped(choose),
        )

    def followed_by(self, others: Sequence["StoredWeight"]) -> "StoredWeight | None":
        """Return one weight of the outputs of several of one kind; None: they are of several."""
        parts = (self, *others)
        tables = {part.table is None for part in parts}
        forms = {(p.zeros is None, p.offsets is None, p.levels is None) for p in parts}
        if len(tables) > 1 or len(forms) > 1 or any(p.groups_of_inputs is not None for p in parts):
            return None
        if self.table is not None and any(
            p.table is None or not torch.equal(p.table, self.table) for p in parts
        ):
            return None

        def joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            return torch.cat(present, dim=-2) if present else None

        codes, scales = (
            torch.cat(each, dim=-2)
            for each in zip(*((p.codes, p.scales) for p in parts), strict=True)
        )
        return dataclasses.replace(
            self,
            codes=codes,
            scales=scales,
            zeros=joined([p.zeros for p in parts]),
            offsets=joined([p.offsets for p in parts]),
            levels=None,
        )

    def reordered(self, order: torch.Tensor) -> "StoredWeight":
        """Return the weight with its inputs in another order. order: [in] int64."""
        moved = dataclasses.replace(self, codes=self.codes[..., order], levels=None)
        starts = order[:: self.group_size]
        in_groups = (starts[:, None] + torch.arange(self.group_size)).flatten()
        if self.groups_of_inputs is None and torch.equal(in_groups, order):
            groups = starts // self.group_size
            zeros = None if self.zeros is None else self.zeros[..., groups]
            offsets = None if self.offsets is None else self.offsets[..., groups]
            scales = self.scales[..., groups]
            return dataclasses.replace(moved, scales=scales, zeros=zeros, offsets=offsets)
        of_inputs = self.groups_of_inputs
        if of_inputs is None:
            of_inputs = torch.arange(self.shape[-1]) // self.group_size
        return dataclasses.replace(moved, groups_of_inputs=of_inputs[order])

    def inputs(self, first: int, end: int) -> "StoredWeight":
        """Return the weight of the inputs from first to end - 1."""
        codes = self.codes[..., first:end]
        if self.groups_of_inputs is not None:
            groups = self.groups_of_inputs[first:end]
            return dataclasses.replace(self, codes=codes, groups_of_inputs=groups, levels=None)
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
            levels=None if self.levels is None else self._levels_of(self.levels, first, end),
        )

    def _levels_of(self, levels: ScaleLevels, first: int, end: int) -> ScaleLevels | None:
        """Return the levels of these inputs; None if they cut a super-block."""
        if first % SUPER_BLOCK or end % SUPER_BLOCK:
            return None
        num_groups = levels.factors.shape[-1]

        def own(tensor: torch.Tensor) -> torch.Tensor:
            size = self.group_size if tensor.shape[-1] == num_groups else SUPER_BLOCK
            return tensor[..., first // size : end // size]

        return levels.mapped(own)

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


Tensors = Mapping[str, torch.Tensor]
"""Tensors of one layer by the ends of their names."""
Decode = Callable[[str, Tensors], StoredWeight]
"""Joins the tensors of the layer with this name. Raises ConfigError."""


class Scheme(NamedTuple):
    markers: tuple[str, ...]
    """Ends of names that only a quantised layer has."""
    parts: tuple[str, ...]
    """Ends of the names of all its tensors, markers too."""
    decode: Decode
    ignored: tuple[str, ...] = ()
    """Ends of names that concern activations and the KV cache, which are not rounded."""
    weight: str = ".weight"
    """End of the name of what the tensors stand for."""
    is_transposed: bool = False
    """Whether that name means a weight [..., in, out]."""


_SKIP_LISTS = (
    "modules_to_not_convert",
    "ignored_layers",
    "llm_int8_skip_modules",
    "exclude_modules",
    "ignore",
)
"""Fields that list layers which are not quantised; each program has its own."""


def refuse_skipped(fields: ConfigFields, modules: Sequence[str]) -> None:
    """Raise ConfigError if a module is quantised, but a list of the configuration excludes it.

    An entry is a name, its begin or its end, or a pattern with `*`.
    """
    for skip_list in _SKIP_LISTS:
        for entry in fields.texts(skip_list):
            found = next((module for module in modules if _is_listed(entry, module)), None)
            if found is not None:
                raise ConfigError(
                    f"{found} is quantised, but {fields.source} lists {entry!r} under {skip_list}"
                )


def _is_listed(entry: str, module: str) -> bool:
    if "*" in entry:
        return fnmatch.fnmatchcase(module, entry)
    return f".{entry.strip('.')}." in f".{module}."


def require(name: str, tensors: Tensors, *parts: str) -> list[torch.Tensor]:
    """Return these tensors. Raises ConfigError if one is missing."""
    for part in parts:
        if part not in tensors:
            raise ConfigError(f"{name} is quantised but has no {part.lstrip('._')}")
    return [tensors[part] for part in parts]


def require_type(
    name: str, part: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], num_axes: int
) -> None:
    """Raise ConfigError for a tensor of another type or number of axes."""
    if tensor.dtype not in dtypes or tensor.dim() != num_axes:
        raise ConfigError(
            f"{name}{part} is {tensor.dtype} of shape {list(tensor.shape)}; "
            f"{' or '.join(map(str, dtypes))} with {num_axes} axes is meant"
        )
