"""Maximum ranks of LoRA by the kind of the module that it changes."""

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import AdapterTooLargeError


class ModuleKind(enum.StrEnum):
    """Kinds of linear layers that have a maximum rank of their own."""

    ATTENTION = "attention"
    MLP = "mlp"
    """Dense feed-forward parts."""
    EXPERTS = "experts"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    ENDS = "ends"
    """The token embedding and lm_head."""


_ATTENTION: Final = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "W_pack", "wqkv", "wo"),
        *("query_key_value", "dense", "attn.c_attn", "attn.c_proj", "c_attn", "g_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        *("in_proj_qkvz", "in_proj_ba", "in_proj_q", "in_proj_k", "in_proj_v"),
    )
)
"""Names in adapters of the linear layers of attention, recurrences and convolutions."""


def kind_of(module: str) -> ModuleKind:
    """Return the kind of a module by its name in canonical adapters."""
    if module in (EMBEDDING, LM_HEAD):
        return ModuleKind.ENDS
    bare = module.removeprefix("encoder.").removeprefix("cross_attn.")
    if bare in _ATTENTION:
        return ModuleKind.ATTENTION
    if module == "router":
        return ModuleKind.ROUTER
    if module.startswith("experts."):
        return ModuleKind.EXPERTS
    return ModuleKind.SHARED_EXPERT if module.startswith("shared_expert") else ModuleKind.MLP


class RankLimits(msgspec.Struct, frozen=True):
    """Maximum rank of each module: max_lora_rank, and max_lora_ranks where it is listed."""

    rank: int
    """Maximum rank of the kinds that are not listed."""
    by_kind: dict[str, int] = {}

    def __str__(self) -> str:
        listed = ", ".join(f"{kind} {limit}" for kind, limit in self.by_kind.items())
        return f"{self.rank} ({listed})" if listed else str(self.rank)

    def of(self, module: str) -> int:
        return self.by_kind.get(kind_of(module), self.rank)

    @property
    def largest(self) -> int:
        """Largest rank of any module."""
        return max(self.by_kind.get(kind, self.rank) for kind in ModuleKind)

    @property
    def smallest(self) -> int:
        """Smallest maximum rank of any module."""
        return min(self.by_kind.get(kind, self.rank) for kind in ModuleKind)

    def at_most(self, rank: int) -> "RankLimits":
        """Return the limits, each lowered to this rank."""
        by_kind = {kind: min(limit, rank) for kind, limit in self.by_kind.items()}
        return RankLimits(min(self.rank, rank), by_kind)

    def setting_of(self, module: str) -> str:
        """Return the setting that limits a module, for messages."""
        kind = kind_of(module)
        return f"max_lora_ranks ({kind})" if kind in self.by_kind else "max_lora_rank"

    def check(self, module: str, rank: int, where: str) -> None:
        """Raise AdapterTooLargeError for a larger rank. where: name of the tensor or module."""
        if rank > self.of(module):
            raise AdapterTooLargeError(
                f"{where} has rank {rank}; the server holds ranks up to {self.of(module)} on "
                f"{module}: raise {self.setting_of(module)}"
            )


def rank_by_kind(value: Mapping[Any, Any]) -> str | None:
    """Check the setting max_lora_ranks. Returns the error, as the end of a sentence."""
    if set(value) <= set(ModuleKind) and all(rank >= 1 for rank in value.values()):
        return None
    return f"must have ranks of at least 1 for some of {', '.join(ModuleKind)}"
