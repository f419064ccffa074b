"""Layouts of tensors with the LoRA of all experts, and what decides between two that fit.

Files of different tools and versions have the same names and shapes for different orders of the
same numbers.
"""

import enum
import re
from collections.abc import Set

from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.single_experts import Bits
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EXPERT_LORA_CHOICES, ExpertLoraLayout
from loraplex.core.errors import InvalidAdapterError

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?")
_FIRST_SWAPPING = (0, 19, 0)
"""Release of PEFT that swapped the sizes of all parameters of experts; later ones leave out the
transposed ones. Earlier ones swapped none."""


class StackLayout(enum.Enum):
    """Order of a pair of tensors. The value describes it."""

    FLAT = "A [experts * rank, in], B [out, rank * experts]"
    """That of PEFT. In Unsloth's B the experts may vary slower than the rank."""
    EXPERTS_LAST = "A [experts, rank, in], B [out, rank, experts]"
    """That of vLLM."""
    EXPERTS_FIRST = "A [experts or 1, rank, in], B [experts or 1, out, rank]"
    """That of SGLang: 1 is one factor for all experts. A of gate and up may be two, one below the
    other."""

    @classmethod
    def of(cls, num_dimensions: int, is_of_peft: bool) -> "StackLayout | None":
        """Return the layout of tensors. is_of_peft: their names are those of PEFT's wrappers."""
        if num_dimensions == 3:
            return cls.EXPERTS_LAST if is_of_peft else cls.EXPERTS_FIRST
        return cls.FLAT if num_dimensions == 2 and is_of_peft else None

    def factors(
        self,
        a: RawTensor,
        b: RawTensor,
        num_experts: int,
        *,
        num_parts: int,
        is_rank_major: bool,
    ) -> tuple[Bits, Bits] | None:
        """Return A [experts or 1, rank, in] and B [experts or 1, out, rank]; None for no such pair.

        num_parts: projections that B is of. is_rank_major: in a flat B the experts vary faster than
        the rank.
        """
        a_bits, b_bits = a.bits(), b.bits()
        match self:
            case StackLayout.EXPERTS_FIRST:
                is_pair = a.shape[1] in (b.shape[2], num_parts * b.shape[2])
                is_pair &= {a.shape[0], b.shape[0]} <= {1, num_experts}
                return (a_bits, b_bits) if is_pair else None
            case StackLayout.EXPERTS_LAST:
                is_pair = a.shape[0] == num_experts and b.shape[1:] == (a.shape[1], num_experts)
                return (a_bits, b_bits.transpose(2, 0, 1)) if is_pair else None
        rank, rest = divmod(a.shape[0], num_experts)
        if rest or b.shape[1] != a.shape[0]:
            return None
        a_bits = a_bits.reshape(num_experts, rank, -1)
        if is_rank_major:
            return a_bits, b_bits.reshape(-1, rank, num_experts).transpose(2, 0, 1)
        return a_bits, b_bits.reshape(-1, num_experts, rank).transpose(1, 0, 2)


def is_rank_major(config: PeftConfig, shapes: BaseShapes, what: str) -> bool:
    """Whether the experts vary faster than the rank in the columns of a flat B.

    what: names of the tensors, for messages. Raises InvalidAdapterError if nothing decides.
    """
    if config.b_layout is None and not config.is_of_unsloth:
        return True
    layout = config.b_layout or _word_of(shapes, EXPERT_LORA_CHOICES[0])
    if layout is None:
        raise InvalidAdapterError(
            f"the columns of lora_B of {what} may be rank_major or grouped_by_expert: {CONFIG_NAME}"
            " has unsloth_fixed without lora_B_layout. Add lora_B_layout to it, or set "
            "expert_lora_layout to the order that the version of Unsloth wrote"
        )
    return layout == ExpertLoraLayout.RANK_MAJOR


def was_swapped(config: PeftConfig, shapes: BaseShapes, others: Set[bool], what: str) -> bool:
    """Whether A and B of a square weight are those of the transposed weight.

    others: results for the adapter's other tensors, from their shapes. Raises
    InvalidAdapterError if nothing decides.
    """
    if len(others) == 1:
        return next(iter(others))
    release = _RELEASE.fullmatch(config.peft_version or "")
    if release:
        version = tuple(map(int, release.groups()))
        if shapes.has_transposed_experts:
            return version == _FIRST_SWAPPING
        return version <= _FIRST_SWAPPING
    word = _word_of(shapes, EXPERT_LORA_CHOICES[1])
    if word is None:
        raise InvalidAdapterError(
            f"{what} fit the weights and the transposed weights, of which PEFT 0.17 to 0.19.0 "
            f"saves them, and {CONFIG_NAME} has no peft_version of a release. Add it, or set "
            "expert_lora_layout to unswapped or swapped"
        )
    return word is ExpertLoraLayout.SWAPPED


def _word_of(shapes: BaseShapes, words: tuple[ExpertLoraLayout, ...]) -> ExpertLoraLayout | None:
    return next((word for word in shapes.expert_lora_layout if word in words), None)
