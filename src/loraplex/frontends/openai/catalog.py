"""What is served: models and adapters as OpenAI lists them, and their tokenizers."""

import asyncio
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.adapter import AdapterRef
from loraplex.core.errors import InvalidParameterError, TokenOutOfVocabularyError
from loraplex.core.principal import Principal
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.openai.adapter_queries import word
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openai.convert import begins_a_turn, rendered_chat
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.openai.responses import (
    Capabilities,
    Detokenized,
    FieldDefaults,
    ModelEntry,
    ModelList,
    Tokens,
)
from loraplex.frontends.openai.sampling import CHAT_SAMPLING, COMPARE_SAMPLING, default_fields
from loraplex.frontends.openai.schema import (
    DetokenizeBody,
    TokenizeBody,
)
from loraplex.frontends.openai.tools import read_tools, served
from loraplex.frontends.openapi.operation import (
    OF_NAMES,
    Parameter,
    described,
    json_body,
    json_of,
)
from loraplex.serving.backend import AdapterCard, ModelCard

OF_TOKENS = (*OF_NAMES, TokenOutOfVocabularyError)


_DEFAULTS: Final = FieldDefaults(
    compare=default_fields(COMPARE_SAMPLING),
    chat=default_fields(CHAT_SAMPLING, add_special_tokens=False),
    completion=default_fields(SamplingParams(), add_special_tokens=True),
)


class ListedKind(enum.StrEnum):
    """Kind of the entries of a list of models."""

    BASE = "base"
    ADAPTER = "adapter"


_KIND: Final = Parameter(
    "kind", "Only base models, or only adapters; both if it is absent.", {"enum": [*ListedKind]}
)


class ModelEndpoints:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(json_of(ModelList), query=(_KIND,), tag="models", errors=OF_NAMES)
    async def list_models(self, request: Request) -> Response:
        """Base models, and their adapters."""
        kind = word(request.query_params, "kind", ListedKind)
        return json_response(ModelList(self._entries(self._context.principal(request), kind)))

    @described(json_of(ModelEntry), tag="models", errors=OF_NAMES)
    async def get_model(self, request: Request) -> Response:
        """A base model or an adapter."""
        principal = self._context.principal(request)
        name = request.path_params["model_id"]
        card, key = await self._context.backend.find(name, principal)
        if key is None:
            return json_response(_model_entry(card, name))
        adapter = await self._context.backend.adapter_admin.describe(
            principal, AdapterRef(card.name, principal.tenant, key)
        )
        return json_response(_adapter_model_entry(adapter, card, name))

    def _entries(self, principal: Principal, kind: ListedKind | None) -> list[ModelEntry]:
        """Base models by all names, then adapters; `base:adapter` where a plain name would mean
        another."""
        backend = self._context.backend
        cards = {card.name: card for card in backend.models(principal)}
        bases = [_model_entry(card, name) for card in cards.values() for name in card.names]
        if kind is ListedKind.BASE:
            return bases
        adapters = backend.adapters(principal)
        names = [name for card in cards.values() for name in card.names]
        num_named = Counter([*names, *(adapter.name for adapter in adapters)])
        entries = [] if kind is ListedKind.ADAPTER else bases
        for adapter in adapters:
            is_unique = num_named[adapter.name] == 1
            name = adapter.name if is_unique else f"{adapter.model}:{adapter.name}"
            entries.append(_adapter_model_entry(adapter, cards[adapter.model], name))
        return entries


class TokenEndpoints:
    """vLLM's /tokenize and /detokenize."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(json_of(Tokens), tag="tokenizers", body=json_body(TokenizeBody), errors=OF_TOKENS)
    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of a conversation."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, TokenizeBody, self._context.refuse_extra)
        card = (await self._context.target(body.model, principal)).model
        text, adds_special_tokens = await self._text(body, card)
        # A long text takes a while, and the event loop has streams to serve.
        backend = self._context.backend
        token_ids = await asyncio.to_thread(
            backend.model(card.name).tokenize, text, add_special_tokens=adds_special_tokens
        )
        texts = TokenTexts(backend, card.name)
        names = list(map(texts.name_of, token_ids)) if body.return_token_strs else None
        return json_response(Tokens(len(token_ids), card.max_model_len, token_ids, names))

    async def _text(self, body: TokenizeBody, card: ModelCard) -> tuple[str, bool]:
        """The text, and whether special tokens are still to be added."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameterError("give either prompt or messages", param="prompt")
        if body.messages is None:
            return body.prompt or "", body.add_special_tokens is not False
        read_tools(body.tools)
        arguments = {
            "add_generation_prompt": begins_a_turn(body),
            "continue_final_message": bool(body.continue_final_message),
            "documents": body.documents,
            "template_kwargs": body.chat_template_kwargs,
        }
        text = await rendered_chat(
            self._context.backend, card, body.messages, served(body.tools), arguments
        )
        return text, body.add_special_tokens is True

    @described(
        json_of(Detokenized), tag="tokenizers", body=json_body(DetokenizeBody), errors=OF_TOKENS
    )
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, DetokenizeBody, self._context.refuse_extra)
        card = (await self._context.target(body.model, principal)).model
        _check_vocabulary(body.tokens, card)
        text = await asyncio.to_thread(
            self._context.backend.model(card.name).detokenize,
            body.tokens,
            skip_special_tokens=False,
        )
        return json_response(Detokenized(text))


def _check_vocabulary(token_ids: Sequence[int], card: ModelCard) -> None:
    """A tokenizer would leave out what it does not know."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < card.vocab_size:
            param = f"tokens[{index}]"
            raise TokenOutOfVocabularyError(
                f"{param}: token id {token_id} is out of the vocabulary of model {card.name!r}, "
                f"which is 0 to {card.vocab_size - 1}",
                param=param,
            )


def _model_entry(card: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=card.created,
        root=card.name,
        parent=None,
        max_model_len=card.max_model_len,
        device=card.device,
        device_name=card.device_name or None,
        dtype=card.dtype,
        quantization=card.quantization,
        num_labels=card.classes.num_labels or UNSET,
        capabilities=Capabilities(
            chat=card.generates and card.has_chat_template,
            tools=card.generates and card.has_chat_template,
            reasoning=(card.generates and card.has_chat_template and card.chat.separates_reasoning),
            images=False,
            completions=card.generates,
            embeddings=card.encoder is None and not card.vectors.problem,
            scores=not card.scores.problem,
            classification=card.classes.num_labels > 0,
        ),
        defaults=_DEFAULTS,
    )


def _adapter_model_entry(adapter: AdapterCard, base: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=adapter.created,
        root=base.name,
        parent=base.name,
        max_model_len=base.max_model_len,
        num_labels=adapter.num_labels or UNSET,
    )
