"""Canary of an adapter: compares a forward pass with and without it before it is registered."""

import asyncio
from collections.abc import Callable

from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.errors import InvalidAdapterError, RowFailedError, error_from_info
from loraplex.core.output import TokenLogprob
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.adapter_cards import CanaryReport
from loraplex.serving.admission import admit
from loraplex.serving.served_model import ServedModel

PROMPT = "The quick brown fox jumps over the lazy dog."
_TIMEOUT_SECONDS = 120.0
_SAMPLING = SamplingParams(
    max_tokens=1, temperature=0, ignore_eos=True, logprobs=MAX_LOGPROBS, prompt_logprobs=0
)


class NoEffectError(InvalidAdapterError):
    """Adapter that changes nothing."""


async def run_canary(
    model: ServedModel,
    principal: Principal,
    source: AdapterSource,
    new_request_id: Callable[[], RequestId],
    now_ns: int,
) -> CanaryReport:
    """Run both passes and compare them.

    Raises the engine's error about the adapter, or InvalidAdapterError if its pass makes numbers
    that are not finite, or if the passes do not differ at all, since it then has no effect.
    """
    requests = [
        GenerateRequest(
            request_id=new_request_id(),
            model=model.card.name,
            prompt=PROMPT,
            task=Generate(_SAMPLING),
            timeout_seconds=_TIMEOUT_SECONDS,
        )
        for _ in range(2)
    ]
    token_ids = model.tokenizer.encode(PROMPT, True)[: model.card.max_model_len - 1]
    base, adapted = await asyncio.gather(
        _scores(model, principal, requests[0], token_ids, None, now_ns),
        _adapted_scores(model, principal, requests[1], token_ids, source, now_ns),
    )
    report = compare(base, adapted)
    if not report.largest_difference > 0:  # true for NaN, too
        raise NoEffectError(
            f"the adapter changes nothing: {report.num_compared} log probabilities are those of "
            "the base model",
            param="path",
        )
    return report


def compare(base: list[TokenLogprob], adapted: list[TokenLogprob]) -> CanaryReport:
    """Compare the same positions: the prompt's tokens except the first, then the next token.

    If a next token is among the likeliest of one side only, its log probability on the other side
    is at most that of the least likely one there: the remaining difference is counted.
    """
    *base_prompt, base_next = base
    *adapted_prompt, adapted_next = adapted
    differences = [
        abs(one.logprob - other.logprob)
        for one, other in zip(base_prompt, adapted_prompt, strict=True)
    ]
    ours, theirs = dict(base_next.top), dict(adapted_next.top)
    differences += [abs(ours[token_id] - theirs[token_id]) for token_id in ours.keys() & theirs]
    for side, other in ((ours, theirs), (theirs, ours)):
        most = min(other.values())
        differences += [max(0.0, side[token_id] - most) for token_id in side.keys() - other]
    return CanaryReport(
        num_compared=len(differences),
        largest_difference=max(differences),
        mean_difference=sum(differences) / len(differences),
        base_token_id=base_next.token_id,
        adapter_token_id=adapted_next.token_id,
    )


async def _adapted_scores(
    model: ServedModel,
    principal: Principal,
    request: GenerateRequest,
    token_ids: list[int],
    source: AdapterSource,
    now_ns: int,
) -> list[TokenLogprob]:
    try:
        return await _scores(model, principal, request, token_ids, source, now_ns)
    except RowFailedError as error:
        raise InvalidAdapterError(
            f"with the adapter the canary fails: {error.message}", param="path"
        ) from error


async def _scores(
    model: ServedModel,
    principal: Principal,
    request: GenerateRequest,
    token_ids: list[int],
    source: AdapterSource | None,
    now_ns: int,
) -> list[TokenLogprob]:
    engine_request = admit(
        request,
        token_ids,
        model=model.card,
        eos_token_ids=model.eos_token_ids,
        adapters=() if source is None else (AdapterUse(source.digest),),
        principal=principal,
        now_ns=now_ns,
    )
    stream = model.engine.submit(engine_request, [] if source is None else [source])
    found: list[TokenLogprob] = []
    try:
        while True:
            for output in await stream.take():
                if output.error is not None:
                    raise error_from_info(output.error)
                found += [score for score in output.prompt_logprobs or () if score is not None]
                found += [score for delta in output.deltas for score in delta.logprobs]
                if output.finished:
                    return found
    finally:
        model.engine.abort(request.request_id)
