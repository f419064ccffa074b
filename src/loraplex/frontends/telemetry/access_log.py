"""The access log: one JSON object a line, one line a request.

It contains no header except the user agent, no query, no body, and no text of prompts or outputs,
unless the operator turned prompts on.
"""

import datetime
from typing import Any

import msgspec

from loraplex.frontends.telemetry.line_writer import LineWriter
from loraplex.serving.wire_request import GenerationRecord, WireRequest

MAX_PROMPT = 20_000
"""Characters, or tokens, of a prompt that is written down."""
MAX_PATH = 1000


class AccessLog:
    """A sink of `Telemetry`."""

    def __init__(self, writer: LineWriter, *, with_prompts: bool = False) -> None:
        self._writer = writer
        self._with_prompts = with_prompts

    def __call__(self, request: WireRequest) -> None:
        entry = access_entry(request, with_prompts=self._with_prompts)
        self._writer.write(msgspec.json.encode(entry) + b"\n")


def access_entry(request: WireRequest, *, with_prompts: bool = False) -> dict[str, Any]:
    """The line's object."""
    generations = (generation_fields(each) for each in request.generations)
    if with_prompts:
        generations = (
            fields | {"prompt": each.request.prompt[:MAX_PROMPT]}
            for fields, each in zip(generations, request.generations, strict=True)
        )
    return request_fields(request) | {"generations": list(generations)}


def request_fields(request: WireRequest) -> dict[str, Any]:
    """Describe a request without its generations.

    Seconds are rounded to microseconds; null is what did not happen.
    """
    return {
        "time": _utc(request.started_unix_ns),
        "request_id": request.request_id,
        "trace_id": request.trace.trace_id,
        "protocol": request.protocol,
        "client": request.client,
        "tenant": request.tenant or None,
        "method": request.method or None,
        "route": request.route or None,
        "path": request.path[:MAX_PATH],
        "status": int(request.status) if request.status.isdecimal() else request.status or None,
        "error": request.error_code or None,
        "seconds": _seconds(request.started_ns, request.ended_ns),
        "prompt_tokens": sum(each.num_prompt_tokens for each in request.generations),
        "completion_tokens": sum(each.num_output_tokens for each in request.generations),
        "user_agent": request.user_agent or None,
    }


def generation_fields(record: GenerationRecord) -> dict[str, Any]:
    timing = record.timing
    client_id = record.request.client_request_id
    return {
        "model": record.request.model,
        "task": record.request.task.name,
        "adapters": record.adapters,
        "client_request_id": client_id[:256] or None,
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_output_tokens,
        "cached_tokens": timing.num_cached_tokens if timing else None,
        "queue_seconds": _rounded(timing.queue_seconds) if timing else None,
        "first_token_seconds": _seconds(record.started_ns, record.first_token_ns),
        "seconds": _seconds(record.started_ns, record.ended_ns),
        "finish_reasons": record.ends,
        "error": record.error.code if record.error is not None else None,
    }


def _utc(unix_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(unix_ns / 1e9, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(start_ns: int, end_ns: int) -> float | None:
    return _rounded((end_ns - start_ns) / 1e9) if end_ns else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
