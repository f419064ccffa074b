"""Sizes of a GPU's programs that depend on the card: tiles, and how long sums are split.

What is best on a card is found by measuring (execution.checking.tuning). A size decides the order
of sums, so it is fixed for as long as a model is served, and the defaults are used where nothing
was measured. Every candidate compiles for sm_80 and sm_90, and spills no more registers than ours:
none, but for three in the tile of `decode` with int4 on sm_80.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_TILES_TOGETHER: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ProductTile:
    """How one program computes some rows and outputs."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    programs: int = 1
    """A sum is split until there are so many programs; 1: never."""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.outputs,
            "GROUP_M": _TILES_TOGETHER,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def count(self, num_rows: int, num_outputs: int) -> int:
        return -(-num_rows // self.rows) * -(-num_outputs // self.outputs)

    def __str__(self) -> str:
        size = f"{self.rows}x{self.outputs}, {self.num_warps} warps, {self.num_stages} stages"
        return size if self.programs == 1 else f"{size}, {self.programs} programs"


DECODE_ROWS: Final = 16
"""Rows of int8 and int4 products up to which `decode` is used."""
FEW_ROWS: Final = 64
"""The same of `few_rows`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSizes:
    """One size for each name. Products are of 16 bits; others have constants of their own."""

    decode: ProductTile = ProductTile(16, 128, 4, 4, programs=264)
    """int8 and int4 weights, up to 16 rows."""
    few_rows: ProductTile = ProductTile(64, 64, 4, 3, programs=264)
    """The same of up to 64 rows; of any number of rows if batch-invariant."""
    many_rows: ProductTile = ProductTile(128, 128, 8, 2, programs=132)
    """The same of more rows, on Hopper."""
    invariant: ProductTile = ProductTile(64, 64, 4, 4)
    """Weights of 16 bits and float8, batch-invariant."""
    few_experts: ProductTile = ProductTile(16, 64, 4, 4)
    """Weights of experts, of 16 bits: up to 8 rows of each, on average."""
    some_experts: ProductTile = ProductTile(64, 64, 4, 4)
    """The same of up to 64 rows; of any number of rows if batch-invariant."""
    many_experts: ProductTile = ProductTile(128, 128, 8, 3)
    """The same of more rows."""
    attention_programs: int = 2
    """Programs of attention that decode, for each processor: keys are split to have so many."""
    lora_splits: int = 32
    """Maximum splits of the inputs of LoRA: the second program reads the sums of all."""


DEFAULT_SIZES: Final = ProgramSizes()

CANDIDATES: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "decode": (
            ProductTile(16, 128, 4, 4, programs=528),
            ProductTile(16, 64, 4, 4, programs=528),
            ProductTile(16, 64, 4, 3, programs=264),
        ),
        "few_rows": (
            ProductTile(32, 64, 4, 4, programs=264),
            ProductTile(32, 128, 4, 3, programs=264),
            ProductTile(64, 128, 8, 3, programs=264),
        ),
        "many_rows": (
            ProductTile(128, 128, 8, 3, programs=132),
            ProductTile(64, 128, 8, 3, programs=132),
        ),
        "invariant": (
            ProductTile(32, 64, 4, 4),
            ProductTile(64, 128, 8, 3),
            ProductTile(128, 128, 8, 3),
        ),
        "few_experts": (ProductTile(16, 128, 4, 4), ProductTile(16, 64, 4, 5)),
        "some_experts": (ProductTile(32, 128, 4, 4), ProductTile(64, 128, 8, 4)),
        "many_experts": (ProductTile(64, 128, 8, 4), ProductTile(128, 64, 4, 4)),
        "attention_programs": (1, 4),
        # Eight spill: a program would sum up too many blocks of a long input.
        "lora_splits": (16,),
    }
)
"""What is tried in place of each default."""


def chosen_sizes(names: Mapping[str, str]) -> ProgramSizes:
    """Return the sizes whose text is given, by name, and the defaults of the others.

    Raises KeyError for a text that no candidate has.
    """
    chosen = {}
    for name, text in names.items():
        chosen[name] = {str(size): size for size in CANDIDATES[name]}[text]
    return dataclasses.replace(DEFAULT_SIZES, **chosen)
