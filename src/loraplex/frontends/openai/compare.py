"""POST /v1/compare: one prompt over many adapters, their outputs side by side."""

import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import InvalidParameterError, LoraplexError
from loraplex.core.output import ResolvedAdapter
from loraplex.core.request import GenerateRequest, check_adapters
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.frontends.adapter_choices import FIELD, read_choice, read_choices
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.context import OpenAIContext, json_response, request_id
from loraplex.frontends.openai.convert import (
    check_priority,
    load_policy,
    prompts,
)
from loraplex.frontends.openai.errors import ErrorDetail, error_body
from loraplex.frontends.openai.logprobs import MIN_LOGPROB, TokenTexts, chat_logprobs
from loraplex.frontends.openai.rendering import rendered_chat
from loraplex.frontends.openai.responses import ContentLogprob
from loraplex.frontends.openai.sampling import sampling_params
from loraplex.frontends.openai.schema import CompareBody
from loraplex.frontends.openai.unsupported import refuse_unknown, refuse_unsupported
from loraplex.frontends.openapi.operation import ANY_ERROR, described, json_body, json_of
from loraplex.frontends.streams import until_disconnect
from loraplex.serving.compare import (
    Compared,
    ComparedOutput,
    Difference,
    FirstDifference,
    compare,
    comparison_requests,
)


class DifferingToken(Struct, frozen=True):
    """One of the two tokens, and its log probability by both models."""

    token: str
    token_id: int
    logprob: float | None
    """Log probability under this output's model; null if it is not among its 20 likeliest."""
    base_logprob: float | None


class FirstDifferenceEntry(Struct, frozen=True):
    position: int
    here: DifferingToken
    base: DifferingToken


class DifferenceEntry(Struct, frozen=True):
    num_same_tokens: int
    mean_logprob_difference: float | None
    first: FirstDifferenceEntry | None


class CompareEntry(Struct, frozen=True, kw_only=True):
    """One output, or an `error`."""

    index: int
    asked: Any  # language: quoted
    """The entry of `adapters`, as it was sent."""
    adapters: tuple[ResolvedAdapter, ...] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    logprob: float | UnsetType = UNSET
    """Log probability of the whole output."""
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    total_ms: float | UnsetType = UNSET
    num_cached_tokens: int | UnsetType = UNSET
    versus_base: DifferenceEntry | UnsetType | None = UNSET
    error: ErrorDetail | None = None


class Comparison(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["comparison"] = "comparison"
    created: int
    model: str
    prompt_tokens: int
    seed: int | None
    """Seed of all draws; send it again to draw the same."""
    answers: list[CompareEntry]  # language: quoted


class CompareEndpoints:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(
        json_of(Comparison),
        tag="completions",
        body=json_body(CompareBody),
        errors=ANY_ERROR,
    )
    async def compare(self, request: Request) -> Response:
        """One prompt over many adapters, their outputs side by side."""
        principal = self._context.principal(request)
        body = await self._context.body(request, CompareBody)
        _check(body)
        choices = self._choices(body)
        target = await self._context.target(body.model, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {body.model!r} is an adapter: name it in adapters",
                param="model",
            )
        generation = await self._request(body, target, request_id(request))
        requests = comparison_requests(self._context.backend, generation, choices)
        compared = await until_disconnect(
            request.receive, compare(self._context.backend, requests, principal)
        )
        found = [each for each in compared if isinstance(each, ComparedOutput)]
        if not found:
            raise next(error for error in compared if isinstance(error, LoraplexError))
        writer = _Writer(TokenTexts(self._context.backend, target.model.name), body.logprobs or 0)
        return json_response(
            Comparison(
                id=f"cmp-{request_id(request)}",
                created=int(time.time()),
                model=target.model.name,
                prompt_tokens=len(found[0].prompt_token_ids),
                seed=requests[0].sampling.seed,
                answers=[
                    writer.entry(index, entry, output)
                    for index, (entry, output) in enumerate(
                        zip(body.adapters, compared, strict=True)
                    )
                ],
            )
        )

    def _choices(self, body: CompareBody) -> list[tuple[AdapterChoice, ...]]:
        """Adapters of each output; malformed ones are refused before anything runs."""
        most = self._context.options.max_prompts
        if not 1 <= len(body.adapters) <= most:
            raise InvalidParameterError(
                f"adapters must have 1 to {most} entries, one for each output, null for the base "
                f"model; got {len(body.adapters)}",
                param=FIELD,
            )
        choices = [_choice(entry, f"{FIELD}[{i}]") for i, entry in enumerate(body.adapters)]
        for adapters in choices:
            check_adapters(adapters)
        return choices

    async def _request(self, body: CompareBody, target: Target, client_id: str) -> GenerateRequest:
        is_chat = body.messages is not None
        prompt = await self._prompt(body, target)
        return GenerateRequest(
            request_id=0,
            client_request_id=client_id,
            model=target.model.name,
            prompt=prompt,
            sampling=_sampling(body, target),
            load_policy=load_policy(body),
            # A template has written them already.
            add_special_tokens=(
                body.add_special_tokens is True if is_chat else body.add_special_tokens is not False
            ),
            priority=body.priority or 0,
        )

    async def _prompt(self, body: CompareBody, target: Target) -> str | tuple[int, ...]:
        if body.messages is None:
            assert body.prompt is not None
            [prompt] = prompts(body.prompt, max_prompts=1)
            return prompt
        arguments = {
            "add_generation_prompt": body.add_generation_prompt is not False,
            "template_kwargs": body.chat_template_kwargs,
        }
        return await rendered_chat(
            self._context.backend, target.model, body.messages, arguments=arguments
        )


class _Writer:
    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top

    def entry(self, index: int, sent: Any, output: Compared) -> CompareEntry:
        if isinstance(output, LoraplexError):
            return CompareEntry(index=index, asked=sent, error=error_body(output).error)
        shown = [
            msgspec.structs.replace(token, top=token.top[: self._num_top])
            for token in output.logprobs
        ]
        versus = output.versus_base
        return CompareEntry(
            index=index,
            asked=sent,
            adapters=output.adapters,
            text=output.text,
            finish_reason=output.finish_reason,
            num_tokens=len(output.token_ids),
            logprob=max(output.logprob, MIN_LOGPROB),
            logprobs=chat_logprobs(shown, self._texts).content,
            ttft_ms=round(output.ttft_ms, 3),
            total_ms=round(output.total_ms, 3),
            num_cached_tokens=output.timing.num_cached_tokens,
            versus_base=None if versus is None else self._difference(versus),
        )

    def _difference(self, versus: Difference) -> DifferenceEntry:
        first = None if versus.first is None else self._first(versus.first)
        return DifferenceEntry(versus.num_same_tokens, versus.mean_logprob_difference, first)

    def _first(self, first: FirstDifference) -> FirstDifferenceEntry:
        here, base = (
            DifferingToken(
                self._texts.bytes_of(token_id).decode(errors="replace"), token_id, mine, its
            )
            for token_id, mine, its in (
                (first.token_id, first.token_logprob, first.token_logprob_by_base),
                (first.base_token_id, first.base_token_logprob, first.base_token_logprob_by_base),
            )
        )
        return FirstDifferenceEntry(first.position, here, base)


def _check(body: CompareBody) -> None:
    """Every refusal that needs neither a model nor an adapter."""
    refuse_unsupported(body.model_extra)
    refuse_unknown(body)
    check_priority(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("give either prompt or messages", param="prompt")
    if not 0 <= (body.logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidParameterError(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {body.logprobs}", param="logprobs"
        )


def _choice(entry: Any, path: str) -> tuple[AdapterChoice, ...]:
    if entry is None:
        return ()
    return read_choices(entry, path) if isinstance(entry, list) else (read_choice(entry, path),)


def _sampling(body: CompareBody, target: Target) -> SamplingParams:
    """Greedy, if nothing else is said: then only the adapters differ."""
    fields: dict[str, Any] = {} if body.temperature is not None else {"temperature": 0.0}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    return sampling_params(body, fields, target.model.vocab_size)
