"""A request that has ended as a tree of spans, in plain values: what it waited for, and how long.

Names of attributes are OpenTelemetry's semantic conventions, as of version 1.41: HTTP and RPC
server spans, and for each prompt a span of the GenAI conventions. Under `loraplex.` stands what
they have no name for. They contain no text of prompts or outputs.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from loraplex.core.output import RequestTiming
from loraplex.core.task import Generate
from loraplex.serving.wire_request import GenerationRecord, WireRequest

AttributeValue = str | int | float | list[str]
Attributes = Mapping[str, AttributeValue]

PROVIDER = "loraplex"
_POOLED = MappingProxyType({"embed": "embeddings"})
"""Operations by the name of a task that generates nothing; any other is that name."""
_OUR_GRPC_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")
"""Codes that, together with DATA_LOSS, make a server's span an error; others are the client's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpanTree:
    """One span and those within it. Times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    failure: str = ""
    """What makes it a failed span; empty for others."""
    children: tuple["SpanTree", ...] = ()


def span_tree(request: WireRequest) -> SpanTree:
    """The request's own span around one for each of its prompts."""
    offset_ns = request.started_unix_ns - request.started_ns
    generations = (
        _generation(record, _operation(request, record), request.ended_ns, offset_ns)
        for record in request.generations
    )
    return SpanTree(
        name=_name(request),
        start_ns=request.started_unix_ns,
        end_ns=request.ended_ns + offset_ns,
        attributes={**_wire_attributes(request), **_shared_attributes(request)},
        failure=_failure(request),
        children=tuple(generations),
    )


def _operation(request: WireRequest, record: GenerationRecord) -> str:
    task = record.request.task
    if not isinstance(task, Generate):
        return _POOLED.get(task.name, task.name)
    return "chat" if request.path.endswith("/chat/completions") else "text_completion"


def _name(request: WireRequest) -> str:
    if request.method:
        return f"{request.method} {request.route}".strip()
    return request.path.removeprefix("/")


def _wire_attributes(request: WireRequest) -> Attributes:
    if request.method:
        attributes: dict[str, AttributeValue] = {
            "http.request.method": request.method,
            "http.response.status_code": int(request.status),
            "url.path": request.path,
        }
        if request.route:
            attributes["http.route"] = request.route
        return attributes
    return {
        "rpc.system.name": "grpc" if request.protocol.startswith("grpc") else PROVIDER,
        "rpc.method": request.path.removeprefix("/"),
        "rpc.response.status_code": request.status,
    }


def _shared_attributes(request: WireRequest) -> Attributes:
    attributes = {
        "client.address": request.client,
        "user_agent.original": request.user_agent,
        "error.type": request.error_code,
        "loraplex.request_id": request.request_id,
        "loraplex.tenant": request.tenant,
    }
    return {name: value for name, value in attributes.items() if value}


def _failure(request: WireRequest) -> str:
    is_ours = (
        request.status.startswith("5")
        if request.method
        else request.status in (*_OUR_GRPC_FAULTS, "DATA_LOSS")
    )
    return (request.error_code or request.status) if is_ours else ""


def _generation(
    record: GenerationRecord, operation: str, request_ended_ns: int, offset_ns: int
) -> SpanTree:
    model = record.request.model
    return SpanTree(
        name=f"{operation} {model}",
        start_ns=record.started_ns + offset_ns,
        end_ns=(record.ended_ns or request_ended_ns) + offset_ns,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            **_sampling_attributes(record),
            **_outcome_attributes(record),
        },
        failure=record.error.code if record.error is not None else "",
        children=tuple(_stages(record, offset_ns)),
    )


def _sampling_attributes(record: GenerationRecord) -> Attributes:
    task = record.request.task
    if not isinstance(task, Generate):
        return {}
    sampling = task.sampling
    attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _outcome_attributes(record: GenerationRecord) -> Attributes:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.response.finish_reasons": [str(end) for end in record.ends],
        "loraplex.adapter.names": [adapter.name for adapter in record.adapters],
        "loraplex.adapter.digests": [adapter.digest for adapter in record.adapters],
    }
    if record.timing is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.timing.num_cached_tokens
        attributes["loraplex.preemptions"] = record.timing.num_preemptions
        attributes["loraplex.engine_restarts"] = record.timing.num_restarts
    if record.first_token_ns:
        seconds = (record.first_token_ns - record.started_ns) / 1e9
        attributes["gen_ai.response.time_to_first_chunk"] = seconds
    if record.error is not None:
        attributes["error.type"] = record.error.code
    return attributes


def _stages(record: GenerationRecord, offset_ns: int) -> Iterator[SpanTree]:
    """Yield the stages in order. The engine reports its stages with the last output only."""
    if record.admitted_ns:
        yield _stage("admit", record.started_ns, record.admitted_ns, offset_ns)
    timing = record.timing
    if timing is None or not timing.first_scheduled_ns:
        return
    loads = tuple(_adapter_load(record, timing, offset_ns))
    yield _stage("queue", timing.arrival_ns, timing.first_scheduled_ns, offset_ns, loads)
    if timing.first_token_ns:
        yield _stage("prefill", timing.first_scheduled_ns, timing.first_token_ns, offset_ns)
    if timing.last_token_ns > timing.first_token_ns:
        yield _stage("decode", timing.first_token_ns, timing.last_token_ns, offset_ns)


def _adapter_load(
    record: GenerationRecord, timing: RequestTiming, offset_ns: int
) -> Iterator[SpanTree]:
    """Nothing for the base model, and for adapters that were on the device."""
    if record.adapters and timing.adapter_ready_ns > timing.arrival_ns:
        attributes = {
            "loraplex.adapter.load_seconds": timing.adapter_load_seconds,
            "loraplex.adapter.copy_seconds": timing.adapter_copy_seconds,
        }
        start_ns, end_ns = timing.arrival_ns, timing.adapter_ready_ns
        yield _stage("adapter load", start_ns, end_ns, offset_ns, attributes=attributes)


def _stage(
    name: str,
    start_ns: int,
    end_ns: int,
    offset_ns: int,
    children: tuple[SpanTree, ...] = (),
    attributes: Attributes = MappingProxyType({}),
) -> SpanTree:
    """Return a span between two readings of the monotonic clock."""
    return SpanTree(
        name=name,
        start_ns=start_ns + offset_ns,
        end_ns=max(start_ns, end_ns) + offset_ns,
        attributes=attributes,
        children=children,
    )
