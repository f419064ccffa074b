"""The groups of a step's LoRA in pieces, packed into one array for an accelerator."""

import dataclasses
import itertools

import torch

_SECTION = 4
"""Each array of LoraSegments begins at a multiple of so many elements, which are 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSegments:
    """The groups of a LoraBatch in pieces, as an accelerator reads them: views of one array.

    Piece i of wave w applies the adapter entries[w, i] to the tokens
    token_indices[starts[w, i] : starts[w, i] + counts[w, i]]. After a wave's pieces there are
    empty ones, whose entry is -1.
    """

    packed: torch.Tensor  # [any] int32, on the host at first
    entries: torch.Tensor  # [waves, pieces] int32
    starts: torch.Tensor  # [waves, pieces] int32
    counts: torch.Tensor  # [waves, pieces] int32
    token_indices: torch.Tensor  # [waves * num_tokens] int32
    token_scales: torch.Tensor  # [waves * num_tokens] float32
    longest: int
    """Tokens of the longest piece that there may be."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.packed,)

    def at(self, packed: torch.Tensor) -> "LoraSegments":
        """The same in a copy of `packed`, such as one on a device."""
        num_waves, num_pieces = self.entries.shape
        return segments_in(packed, num_waves, num_pieces, len(self.token_indices), self.longest)


def segments_in(
    packed: torch.Tensor, num_waves: int, num_pieces: int, num_indices: int, longest: int
) -> LoraSegments:
    """Return the segments of which `packed` is, or will be, the array."""
    firsts = section_starts(num_waves, num_pieces, num_indices)
    entries, starts, counts = (
        packed[first : first + num_waves * num_pieces].view(num_waves, num_pieces)
        for first in firsts[:3]
    )
    indices, scales = (packed[first : first + num_indices] for first in firsts[3:5])
    scales = scales.view(torch.float32)
    return LoraSegments(packed, entries, starts, counts, indices, scales, longest)


def section_starts(num_waves: int, num_pieces: int, num_indices: int) -> list[int]:
    """Where entries, starts, counts, token_indices and token_scales begin, and where all ends."""
    sizes = [num_waves * num_pieces] * 3 + [num_indices] * 2
    return list(itertools.accumulate((size + -size % _SECTION for size in sizes), initial=0))
