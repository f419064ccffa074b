"""Settings of a model's runner."""

from pathlib import Path

import msgspec

from loraplex.core.engine_settings import NO_CACHE, EngineSettings
from loraplex.core.weight_precision import WeightPrecision


class RunnerSettings(EngineSettings, frozen=True, kw_only=True):
    """The engine's settings, and what no operator sets."""

    device: str = "cpu"
    """The chosen one: never `auto`."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_blocks: int | None = None
    """Number of KV blocks, in place of kv_cache_bytes."""
    host_bytes: int | None = None
    """Memory of this rank's machine, by which the adapters' pool is sized where nothing else does;
    None: not known."""
    logits_dir: Path | None = None
    """Private folder for the logits that requests want back; None: such a request fails."""

    @property
    def precision(self) -> WeightPrecision:
        return WeightPrecision(self.quantization)

    def share_of_host(self, num_ranks: int, host_bytes: int | None) -> "RunnerSettings":
        """Divide the bytes that the operator gives an engine between ranks in one host's memory.

        host_bytes: the host's; None: not known.
        """
        names = (
            "memory_bytes",
            "kv_cache_bytes",
            "kv_cache_host_memory_bytes",
            "lora_device_bytes",
        )
        values = {name: getattr(self, name) for name in names} | {"host_bytes": host_bytes}
        shares = {name: value // num_ranks for name, value in values.items() if value}
        return msgspec.structs.replace(self, **shares)

    @property
    def weights_cache(self) -> Path | None:
        """Folder of packed weights. An empty name means none: serving fills in the default."""
        folder = self.weights_cache_dir or NO_CACHE
        return None if folder == NO_CACHE else Path(folder)
