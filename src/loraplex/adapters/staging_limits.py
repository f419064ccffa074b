"""Limits of the files and tensors of an adapter."""

import msgspec

from loraplex.core.rank_limits import RankLimits


class StagingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that are checked before anything is read."""

    max_ranks: RankLimits = RankLimits(64)
    max_file_bytes: int = 4 << 30
    max_header_bytes: int = 16 << 20
    """Maximum header of a safetensors file, and maximum size of adapter_config.json."""
    max_tensors: int = 100_000
