"""Admitted requests, of which a test sets only the fields that matter to it."""

from typing import Any

from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate


def engine_request(
    prompt_token_ids: tuple[int, ...], sampling: SamplingParams | None = None, **fields: Any
) -> EngineRequest:
    """Return an EngineRequest with these fields; the defaults are request 1 at time 0."""
    defaults: dict[str, Any] = {
        "request_id": 1,
        "eos_token_ids": (),
        "adapters": (),
        "kv_salt": b"",
        "tenant": "",
        "priority": 0,
        "arrival_ns": 0,
        "deadline_ns": None,
    }
    return EngineRequest(
        prompt_token_ids=prompt_token_ids,
        task=Generate(SamplingParams() if sampling is None else sampling),
        **(defaults | fields),
    )
