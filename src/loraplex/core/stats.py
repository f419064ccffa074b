"""Statistics of an engine, sent once a step: plain numbers that serving turns into metrics."""

import bisect

import msgspec

from loraplex.core.adapter import Residency
from loraplex.core.plan import StepTiming

LOAD_SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the buckets of a Durations; one more bucket has all longer times."""


class StepRecord(msgspec.Struct, frozen=True):
    """One launched step, for the iteration log."""

    step_id: int
    start_ns: int
    duration_ns: int
    """Time from the start of planning to the result."""
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
    """Requests of the rows, in the plan's order."""
    num_prefill_tokens: int = 0
    """Part of num_tokens that prefill rows computed."""
    num_draft_tokens: int = 0
    """Part of num_tokens that are draft tokens."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    num_new_tokens: int = 0
    """Tokens that the rows sampled, accepted draft tokens included."""
    num_added: int = 0
    """Rows that joined: new sequences, and preempted ones that were admitted again."""
    num_failed_rows: int = 0
    adapter_rows: dict[str, int] = {}
    """Number of rows of each adapter, by digest; limited to the adapters with the most rows."""
    prefill_rows: dict[str, int] = {}
    """Part of adapter_rows that are prefill rows; those of the base model have an empty digest."""
    draft_rows: dict[str, int] = {}
    """The same for rows with draft tokens."""
    num_base_rows: int = 0
    """Rows without an adapter."""
    block_offloads: int = 0
    block_loads: int = 0
    """KV blocks that were copied back from host memory; block_offloads went there."""
    block_copies: int = 0
    adapter_loads_ended: int = 0
    """Adapter loads into host memory that ended or failed since the previous step."""
    adapter_copies_ended: int = 0
    timing: StepTiming = StepTiming()

    @property
    def only_decodes(self) -> bool:
        """Whether rows only went on: none joined, failed or was preempted, and no adapter moved."""
        return not (
            self.num_added
            or self.num_prefill_rows
            or self.num_preempted
            or self.num_failed_rows
            or self.adapter_copies_started
            or self.adapter_copies_ended
            or self.adapter_loads_ended
        )


class Durations(msgspec.Struct, frozen=True):
    """Histogram of times."""

    counts: tuple[int, ...] = (0,) * (len(LOAD_SECONDS_BOUNDS) + 1)
    """Number of times in each bucket, not cumulative."""
    total_ns: int = 0

    def with_one(self, duration_ns: int) -> "Durations":
        """Return the histogram with one more time."""
        bucket = bisect.bisect_left(LOAD_SECONDS_BOUNDS, duration_ns / 1e9)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return Durations(counts, self.total_ns + duration_ns)


class AdapterTierStats(msgspec.Struct, frozen=True):
    """Counters since the engine started, and the present fill."""

    host_bytes_used: int = 0
    host_bytes_total: int = 0
    device_pages_used: int = 0
    device_pages_total: int = 0
    num_on_host: int = 0
    num_on_device: int = 0
    num_held: int = 0
    """Pinned adapters: they stay on the device once they are there."""
    device_hits: int = 0
    """Admissions that found every adapter on the device."""
    device_misses: int = 0
    host_hits: int = 0
    """Device misses whose missing adapters were all on the host."""
    host_misses: int = 0
    loads: int = 0
    load_failures: int = 0
    copies: int = 0
    """Copies from the host to the device."""
    host_evictions: int = 0
    device_evictions: int = 0
    read_times: Durations = Durations()
    """Times of loads from the canonical adapter file into host memory."""
    copy_times: Durations = Durations()
    """Times of copies to the device; those of one step share their time."""


class CacheGroupStats(msgspec.Struct, frozen=True):
    """Blocks of one cache group."""

    held: int = 0
    cached: int = 0
    on_host: int = 0
    free: int = 0
    block_bytes: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot, sent with the outputs of a step; while rows only decode, now and then.

    Blocks of all cache groups count together.
    """

    steps: int = 0
    step_ns: int = 0
    """Counter: time of the steps that ended, each from the start of planning to the result."""
    num_running: int = 0
    num_waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    blocks_on_host: int = 0
    """Host blocks that hold the KV of preempted sequences."""
    cache_groups: tuple[CacheGroupStats, ...] = ()
    """Blocks of each cache group, if there are several."""
    prompt_tokens: int = 0
    """Counter: prompt tokens of admitted sequences."""
    cached_tokens: int = 0
    """Counter: of those, tokens served from the prefix cache."""
    generation_tokens: int = 0
    draft_tokens: int = 0
    """Counter: draft tokens."""
    accepted_tokens: int = 0
    """Counter: draft tokens that were accepted."""
    preemptions: int = 0
    rank_wait_ns: tuple[int, ...] = ()
    """Counter: time that each of several ranks waited for others."""
    adapters: AdapterTierStats = AdapterTierStats()

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that sequences hold, 0 to 1, by the sizes of its blocks."""
        all_blocks = CacheGroupStats(
            self.blocks_held, self.blocks_cached, free=self.blocks_free, block_bytes=1
        )
        groups = self.cache_groups or (all_blocks,)
        num_bytes = sum((g.held + g.cached + g.free) * g.block_bytes for g in groups)
        return sum(g.held * g.block_bytes for g in groups) / num_bytes if num_bytes else 0.0


class AdapterActivity(msgspec.Struct, frozen=True):
    """Place and use of an engine's adapters, by digest, at one moment between two steps."""

    residency: dict[str, Residency] = {}
    """Adapters that are not listed are absent."""
    running: dict[str, int] = {}
    """Sequences that hold a slot."""
    waiting: dict[str, int] = {}
    """Sequences that wait for a slot, blocks or an adapter."""
    pinned: tuple[str, ...] = ()
    """Adapters that stay on the device."""
    leaving: dict[str, int] = {}
    """Pages of the adapters that may be evicted from the device, in the order of eviction."""

    def evicted_for(self, num_pages: int) -> list[str]:
        """Return the adapters that would be evicted to free so many more pages."""
        found: list[str] = []
        for digest, pages in self.leaving.items():
            if num_pages <= 0:
                break
            found.append(digest)
            num_pages -= pages
        return found
