"""How the scheduler trades latency, throughput and fairness. Limits of memory are not here."""

import dataclasses

from loraplex.core.errors import ConfigError

DEFAULT_ADAPTER_AGING_NS = 2_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits of one plan and of the queue."""

    max_num_batched_tokens: int = 512
    """Tokens that one step computes at most, over all rows."""
    max_prefill_chunk: int | None = None
    """Tokens that one row computes at most in one step; None: as many as the step has room for."""
    max_queue_size: int = 0
    """Requests that wait for a slot; 0 is no limit. Those that free slots will take are not
    counted."""
    max_queue_delay_ns: int = 0
    """While nothing runs, how long a request is held back so that others can join its first
    step."""
    enable_prefix_cache: bool = True
    adapter_aging_ns: int = DEFAULT_ADAPTER_AGING_NS
    """How long a request may be passed over because its adapters lack room. See AdapterDemand."""
    adapter_ttl_ns: int | None = None
    """An adapter that was idle for so long leaves both tiers; None: it stays."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        self._check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_prefill_chunk is not None:
            self._check_at_least("max_prefill_chunk", self.max_prefill_chunk, 1)
        self._check_at_least("max_queue_size", self.max_queue_size, 0)
        self._check_at_least("max_queue_delay_ns", self.max_queue_delay_ns, 0)
        self._check_at_least("adapter_aging_ns", self.adapter_aging_ns, 0)
        if self.adapter_ttl_ns is not None:
            self._check_at_least("adapter_ttl_ns", self.adapter_ttl_ns, 1)

    @staticmethod
    def _check_at_least(name: str, value: int, low: int) -> None:
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}", param=name)
