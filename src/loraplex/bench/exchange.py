"""An in-flight request, and its completion."""

import dataclasses

import msgspec

from loraplex.bench.workload import PlannedRequest


@dataclasses.dataclass(slots=True)
class Exchange:
    """An in-flight request, with the bytes of its response. Filled by the sender."""

    request: PlannedRequest
    chunks: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    """(time.perf_counter_ns(), what arrived), each as it arrives and not yet parsed."""
    error: str | None = None
    start_ns: int = 0
    """When it was due; set by the load generator, as is end_ns."""
    end_ns: int = 0


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed response of a finished exchange."""

    chunk_ns: tuple[int, ...] = ()
    """When each chunk with at least one new token arrived. A chunk may hold several tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens from a prefix cache; should be 0 everywhere."""
    num_output_tokens: int = 0
    text: str = ""
    """Text of the output tokens."""
    error: str | None = None
