"""What routes share whose requests yield a value of their prompt: vectors, labels and scores."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from loraplex.core.adapter import AdapterChoice, LoadPolicy
from loraplex.core.errors import AdapterNotFoundError, InvalidParameterError, LoraplexError
from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest, PromptTruncation, TruncationSide
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER, ModelTarget, adapter_field
from loraplex.frontends.openai.context import TextContext, adopt_request_id, request_id
from loraplex.frontends.openai.convert import (
    Origin,
    Prompt,
    check_priority,
    check_salt,
    truncation,
)
from loraplex.frontends.openai.generation import origin
from loraplex.frontends.openai.schema import PooledBody, TruncatedBody
from loraplex.frontends.openai.unsupported import RefusedField, refuse_unknown, refuse_unsupported
from loraplex.frontends.streams import gather_all, until_disconnect

BodyT = TypeVar("BodyT", bound=PooledBody)

MAX_INPUTS: Final = 2048
"""Texts of one request, as at OpenAI."""
REFUSED: Final = MappingProxyType(
    {
        row.field: row
        for row in (
            RefusedField("images", (None, []), "only texts are served"),
            RefusedField("inputs", (None, []), "send texts"),
            RefusedField("messages", (None, []), "send the text that the chat template makes"),
            RefusedField("relevant_spans", (None,), "whole documents are scored"),
            RefusedField("rank_fields", (None, []), "send a document as one text"),
            RefusedField("embed_dtype", (None, "float32"), "values are float32"),
            RefusedField("endianness", (None, "native", "little"), "bytes are little-endian"),
        )
    }
)
"""Fields of the systems whose routes these are."""


class PooledUsage(msgspec.Struct, frozen=True):
    """Tokens of all texts; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class Sent(NamedTuple):
    """A request of one of these routes, as it came."""

    http: Request
    principal: Principal
    body: PooledBody
    target: ModelTarget
    origin: Origin

    @property
    def id(self) -> str:
        return request_id(self.http)

    @property
    def model(self) -> str:
        """Name of the model as the client called it."""
        return self.target.model.name if self.body.model is None else self.body.model

    @property
    def created(self) -> int:
        return int(time.time())

    def request(
        self, adapters: tuple[AdapterChoice, ...], cut: PromptTruncation | None
    ) -> GenerateRequest:
        """Return a request with an empty prompt: what those of all texts have in common."""
        body = self.body
        check_priority(body)
        check_salt(body)
        return GenerateRequest(
            request_id=self.origin.new_request_id(),
            client_request_id=self.origin.client_request_id,
            model=self.target.model.name,
            prompt="",
            adapters=adapters,
            load_policy=LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO),
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
            truncation=cut,
            cache_salt=body.cache_salt or "",
            add_special_tokens=body.add_special_tokens is not False,
        )


async def receive(
    context: TextContext, request: Request, schema: type[BodyT]
) -> tuple[Sent, BodyT]:
    """Read the body of a request, and find its model. Raises RequestErrors."""
    principal = context.principal(request)
    body = await context.parse(request, schema, _refuse)
    adopt_request_id(request, body.request_id)
    target = await context.target(body.model, principal)
    return Sent(request, principal, body, target, origin(context, request)), body


async def outputs_of(
    context: TextContext,
    sent: Sent,
    requests: Sequence[GenerateRequest],
    names: Mapping[str, str],
) -> list[RequestOutput]:
    """Run requests to their ends, all or none. A client that disconnects aborts them.

    names: of our parameters, as the client calls them.
    """

    def reworded(error: LoraplexError) -> LoraplexError:
        field = adapter_field(sent.body, sent.http.headers.get(ADAPTER_HEADER, ""))
        if field and isinstance(error, AdapterNotFoundError):
            error = AdapterNotFoundError(f"{field}: {error.message}", param=field)
        adapter = "adapters" if sent.body.adapters else "model"
        return as_sent(error, {"kind": "model", "adapter": adapter, **names})

    work = gather_all(context.backend, requests, sent.principal, reworded)
    return await until_disconnect(sent.http.receive, work)


def usage_of(outputs: Sequence[RequestOutput]) -> PooledUsage:
    """Return the usage of requests."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PooledUsage(num_tokens, num_tokens)


def check_number(field: str, texts: Sequence[object]) -> None:
    """Raise InvalidParameterError for too many texts."""
    if len(texts) > MAX_INPUTS:
        raise InvalidParameterError(
            f"{field} has {len(texts)} entries; at most {MAX_INPUTS} are allowed in one request",
            param=field,
        )


def check_texts(field: str, texts: Sequence[Prompt]) -> None:
    """Raise InvalidParameterError for no text, for too many of them, and for an empty one."""
    if not texts:
        raise InvalidParameterError(f"{field} is an empty list", param=field)
    check_number(field, texts)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidParameterError(
                f"{field}[{index}] is empty: at least one token is needed", param=field
            )


def body_truncation(body: PooledBody) -> PromptTruncation | None:
    """Return the limit of texts that a body states; None: what is too long is an error."""
    if not isinstance(body, TruncatedBody):
        return truncation(body, TruncationSide.RIGHT)
    named = (body.truncation_direction, body.truncation_side)
    sides = {TruncationSide(each.lower()) for each in named if each is not None}
    if len(sides) > 1:
        raise InvalidParameterError(
            "truncation_side is another name of truncation_direction: give one of them",
            param="truncation_side",
        )
    side = next(iter(sides), TruncationSide.RIGHT)
    if body.truncate is None:
        return truncation(body, side)
    if body.truncate_prompt_tokens is not None:
        raise InvalidParameterError(
            "give truncate or truncate_prompt_tokens, not both", param="truncate"
        )
    return PromptTruncation(None, side) if body.truncate else None


def agreed(body: PooledBody, *fields: str) -> bool | None:
    """Return the value of synonyms of one field. Raises InvalidParameterError if two differ."""
    given = [(field, getattr(body, field)) for field in fields]
    set_ = [(field, value) for field, value in given if value is not None]
    for field, value in set_[1:]:
        if value != set_[0][1]:
            raise InvalidParameterError(
                f"{field} is another name of {set_[0][0]}: give one of them", param=field
            )
    return set_[0][1] if set_ else None


def _refuse(body: PooledBody) -> None:
    refuse_unsupported(body, REFUSED)
    refuse_unknown(body, REFUSED)
