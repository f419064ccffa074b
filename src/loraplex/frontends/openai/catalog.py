"""What is served: models, adapters (vLLM's two routes and our JSON ones), and their tokenizers."""

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.adapter import AdapterRef
from loraplex.core.errors import AdapterNotFoundError, InvalidParameterError, ModelNotFoundError
from loraplex.core.principal import Principal
from loraplex.frontends.openai.convert import chat_messages
from loraplex.frontends.openai.responses import (
    AdapterDeleted,
    AdapterEntry,
    AdapterList,
    Detokenized,
    ModelEntry,
    ModelList,
    Tokens,
)
from loraplex.frontends.openai.room import OpenAIRoom, json_response
from loraplex.frontends.openai.schema import (
    AdapterBody,
    DetokenizeBody,
    LoadLoraBody,
    TokenizeBody,
    UnloadLoraBody,
)
from loraplex.serving.backend import AdapterCard, ModelCard


class ModelEndpoints:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, room: OpenAIRoom) -> None:
        self._room = room

    async def list_models(self, request: Request) -> Response:
        return json_response(ModelList(self._entries(self._room.principal(request))))

    async def get_model(self, request: Request) -> Response:
        principal = self._room.principal(request)
        name = request.path_params["model_id"]
        card, key = self._room.backend.find(name, principal)
        if key is None:
            return json_response(_model_entry(card))
        adapter = find_adapter_card(self._room, name, principal)
        return json_response(_adapter_model_entry(adapter, card, name))

    def _entries(self, principal: Principal) -> list[ModelEntry]:
        """Base models, then adapters; `base:adapter` where a plain name would mean another."""
        backend = self._room.backend
        cards = {card.name: card for card in backend.models()}
        adapters = backend.adapters(principal)
        names = [*cards, *(adapter.name for adapter in adapters)]
        entries = [_model_entry(card) for card in cards.values()]
        for adapter in adapters:
            is_unique = names.count(adapter.name) == 1
            name = adapter.name if is_unique else f"{adapter.model}:{adapter.name}"
            entries.append(_adapter_model_entry(adapter, cards[adapter.model], name))
        return entries


class AdapterEndpoints:
    """/v1/adapters, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    def __init__(self, room: OpenAIRoom) -> None:
        self._room = room

    async def list_adapters(self, request: Request) -> Response:
        cards = self._room.backend.adapters(self._room.principal(request))
        return json_response(AdapterList([_adapter_entry(card) for card in cards]))

    async def get_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        card = find_adapter_card(self._room, request.path_params["name"], principal)
        return json_response(_adapter_entry(card))

    async def load_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, AdapterBody)
        card = await self._room.backend.load_adapter(
            principal,
            model=self._base_model(body.model, principal),
            name=body.name,
            path=body.path,
            task_id=body.task_id,
            replace=bool(body.replace),
        )
        return json_response(_adapter_entry(card), status=201)

    async def delete_adapter(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._unload(name, self._room.principal(request))
        return json_response(AdapterDeleted(name))

    async def load_lora_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, LoadLoraBody)
        await self._room.backend.load_adapter(
            principal,
            model=self._base_model(body.base_model_name, principal),
            name=body.lora_name,
            path=body.lora_path,
            replace=bool(body.load_inplace),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, UnloadLoraBody)
        await self._unload(body.lora_name, principal)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _base_model(self, name: str | None, principal: Principal) -> str:
        target = self._room.target(name, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {name!r} is an adapter", param="model"
            )
        return target.model.name

    async def _unload(self, name: str, principal: Principal) -> None:
        ref = find_adapter_ref(self._room, name, principal)
        await self._room.backend.unload_adapter(principal, ref)


class TokenEndpoints:
    """vLLM's /tokenize and /detokenize."""

    def __init__(self, room: OpenAIRoom) -> None:
        self._room = room

    async def tokenize(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, TokenizeBody)
        card = self._room.target(body.model, principal).model
        text, adds_special_tokens = self._text(body, card)
        # A long text takes a while, and the event loop has streams to serve.
        token_ids = await asyncio.to_thread(
            self._room.backend.tokenize, card.name, text, add_special_tokens=adds_special_tokens
        )
        return json_response(Tokens(len(token_ids), card.max_model_len, token_ids))

    def _text(self, body: TokenizeBody, card: ModelCard) -> tuple[str, bool]:
        """The text, and whether special tokens are still to be added."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameterError("give either prompt or messages", param="prompt")
        if body.messages is None:
            return body.prompt or "", body.add_special_tokens is not False
        text = self._room.backend.render_chat(
            card.name,
            chat_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        return text, body.add_special_tokens is True

    async def detokenize(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, DetokenizeBody)
        card = self._room.target(body.model, principal).model
        text = await asyncio.to_thread(
            self._room.backend.detokenize, card.name, body.tokens, skip_special_tokens=False
        )
        return json_response(Detokenized(text))


def find_adapter_ref(room: OpenAIRoom, name: str, principal: Principal) -> AdapterRef:
    """Raises AdapterNotFoundError if the name means nothing, or a base model."""
    try:
        card, key = room.backend.find(name, principal)
    except ModelNotFoundError as error:
        raise AdapterNotFoundError(error.message, param="name") from None
    if key is None:
        raise AdapterNotFoundError(f"{name!r} is a base model, not an adapter", param="name")
    return AdapterRef(card.name, principal.tenant, key)


def find_adapter_card(room: OpenAIRoom, name: str, principal: Principal) -> AdapterCard:
    ref = find_adapter_ref(room, name, principal)
    for card in room.backend.adapters(principal, ref.model):
        if name in (card.name, f"{card.model}:{card.name}"):
            return card
    raise AdapterNotFoundError(f"there is no {ref}", param="name")


def _model_entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(
        id=card.name,
        created=card.created,
        root=card.name,
        parent=None,
        max_model_len=card.max_model_len,
    )


def _adapter_model_entry(adapter: AdapterCard, base: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=adapter.created,
        root=base.name,
        parent=base.name,
        max_model_len=base.max_model_len,
    )


def _adapter_entry(card: AdapterCard) -> AdapterEntry:
    return AdapterEntry(
        name=card.name,
        model=card.model,
        task_id=card.task_id,
        digest=card.digest,
        created=card.created,
        rank=card.rank,
        num_bytes=card.num_bytes,
        source=card.source,
        warnings=card.warnings,
    )
