"""A response before its first token: what it repeats of its request."""

from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.responses_api.tools import shown_tools
from loraplex.frontends.openai.writers import Call


def begun(body: ResponsesBody, call: Call, *, is_kept: bool) -> wire.ResponseObject:
    """What it repeats of the body, with the values that absent fields have."""
    sampling: SamplingParams = call.requests[0].sampling
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    reasoning = body.reasoning.model_dump(exclude_none=True) if body.reasoning else {}
    return wire.ResponseObject(
        id=call.response_id,
        created_at=call.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=call.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None, **reasoning},
        safety_identifier=body.safety_identifier,
        store=is_kept,
        temperature=sampling.temperature,
        text={"format": {"type": "text"}, "verbosity": "medium", **text},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=shown_tools(body.tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
