"""Settings of a model's runner."""

from pathlib import Path

from loraplex.core.engine_settings import NO_CACHE, EngineSettings
from loraplex.core.weight_precision import WeightPrecision


class RunnerSettings(EngineSettings, frozen=True, kw_only=True):
    """The engine's settings, and what no operator sets."""

    num_blocks: int | None = None
    """Number of KV blocks, in place of kv_cache_bytes."""
    logits_dir: Path | None = None
    """Private folder for the logits that requests want back; None: such a request fails."""

    @property
    def precision(self) -> WeightPrecision:
        return WeightPrecision(self.quantization)

    @property
    def weights_cache(self) -> Path | None:
        """Folder of packed weights. An empty name means none: serving fills in the default."""
        folder = self.weights_cache_dir or NO_CACHE
        return None if folder == NO_CACHE else Path(folder)
