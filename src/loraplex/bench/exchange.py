"""A request under way, and the response that came back."""

import dataclasses

import msgspec

from loraplex.bench.workload import PlannedRequest


@dataclasses.dataclass(slots=True)
class Exchange:
    """A request under way: what was asked, and what came back when. Filled by `Running.send`."""

    request: PlannedRequest
    chunks: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    """(time.perf_counter_ns(), what arrived), each as it arrives and not yet parsed."""
    error: str | None = None
    start_ns: int = 0
    """When it was due; set by the load generator, as is end_ns."""
    end_ns: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished exchange says."""

    chunk_ns: tuple[int, ...] = ()
    """When each chunk with at least one new token arrived. A chunk may hold several tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt, from a prefix cache; should be 0 everywhere."""
    num_output_tokens: int = 0
    text: str = ""
    """Of the output tokens: the join of their `Setup.tokens`."""
    error: str | None = None
