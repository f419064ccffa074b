"""What the operator decides about one model's engine."""

import dataclasses
from pathlib import Path

from loraplex.core.weight_precision import WeightPrecision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What the operator decides about one model's engine."""

    dtype: str = "auto"
    """auto is the checkpoint's own."""
    kv_dtype: str = "auto"
    """Of stored keys and values; auto is the model's."""
    device: str = "cpu"
    cuda_graphs: bool = True
    """On a GPU."""
    cuda_graph_batch_sizes: tuple[int, ...] = ()
    """Empty: see graph_sizes."""
    batch_invariant: bool = False
    """On a GPU; a CPU's kernels are so."""
    attention_backend: str = "auto"
    """Of a GPU: auto, triton or flashinfer."""
    quantization: WeightPrecision = WeightPrecision.NATIVE
    weights_cache_dir: Path | None = None
    """Where packed weights are kept for the next start; None: nowhere."""
    weights_cache_bytes: int = 64 << 30
    max_model_len: int | None = None
    """None: what the model was made for, or less if the KV cache holds less."""
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_bytes: int | None = None
    """None: see size_memory."""
    num_blocks: int | None = None
    """Instead of kv_cache_bytes."""
    max_tokens_in_paged_kv_cache: int | None = None
    """The KV cache is no larger; it is so large where nothing else says its size."""
    kv_cache_host_memory_bytes: int = 0
    """Of the host, for the KV of preempted sequences."""
    max_attention_window_size: tuple[int, ...] = ()
    """Layer i sees at most entry i % len of newest positions; empty: all that the model sees."""
    sink_token_length: int = 0
    """Where there is a window, so many first positions are seen, too."""
    max_num_batched_tokens: int = 512
    """In one step: with a window, a sequence needs blocks for these beside what it sees."""
    memory_bytes: int | None = None
    """What the device may hold: weights, KV cache, adapters, and what steps and graphs take; None:
    unknown on a CPU, else all that is free."""
    kv_cache_fraction: float = 0.9
    max_lora_rank: int = 64
    optimal_lora_rank: int = 8
    """An adapter of this rank on every module fills whole pages."""
    lora_device_bytes: int | None = None
    """None: see size_memory; never less than one adapter of max_lora_rank."""
    lora_device_fraction: float = 0.05
    logits_dir: Path | None = None
    """A private folder for the logits that requests want back; None: they get an error."""
