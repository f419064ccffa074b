"""What an engine tells about itself, once a step: plain numbers that serving turns into metrics."""

import msgspec


class StepRecord(msgspec.Struct, frozen=True):
    """One launched step, for the iteration log."""

    step_id: int
    start_ns: int
    duration_ns: int
    num_rows: int
    num_prefill_rows: int
    """Rows that computed prompt tokens (or recomputed after a preemption)."""
    num_tokens: int
    num_adapters: int
    """Distinct adapters among the rows; the base model does not count."""
    num_running: int
    num_waiting: int
    num_preempted: int
    blocks_held: int
    blocks_cached: int
    blocks_free: int
    adapter_pages_used: int
    adapter_copies_started: int
    request_ids: tuple[int, ...] = ()
    """Of the rows, in the plan's order."""


class AdapterTierStats(msgspec.Struct, frozen=True):
    """Counters since the engine started, and the present fill."""

    host_bytes_used: int = 0
    host_bytes_total: int = 0
    device_pages_used: int = 0
    device_pages_total: int = 0
    num_on_host: int = 0
    num_on_device: int = 0
    device_hits: int = 0
    """Admissions that found every adapter on the device."""
    device_misses: int = 0
    loads: int = 0
    load_failures: int = 0
    host_evictions: int = 0
    device_evictions: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot, sent with the outputs of a step."""

    steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prompt_tokens: int = 0
    """Counter: prompt tokens of admitted sequences."""
    cached_tokens: int = 0
    """Counter: of those, tokens served from the prefix cache."""
    generation_tokens: int = 0
    preemptions: int = 0
    adapters: AdapterTierStats = AdapterTierStats()
