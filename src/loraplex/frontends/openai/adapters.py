"""/v1/adapters, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter.

vLLM's two answer with vLLM's statuses and sentences; ours say more.
"""

from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.adapter import AdapterRef, Residency
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidParameterError,
    ModelNotFoundError,
)
from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_schema import (
    AdapterBody,
    AliasBody,
    LoadLoraBody,
    PinBody,
    RollbackBody,
    UnloadLoraBody,
)
from loraplex.frontends.openai.errors import INVALID, ErrorDetail, json_error
from loraplex.frontends.openai.responses import AdapterDeleted, AdapterList
from loraplex.frontends.openai.room import OpenAIRoom, json_response
from loraplex.serving.adapters.cards import AdapterCard, UnloadMode


class AdapterEndpoints:
    """Names with slashes work: a name is the rest of the path, up to an action."""

    def __init__(self, room: OpenAIRoom) -> None:
        self._room = room
        self._backend = room.backend

    async def list_adapters(self, request: Request) -> Response:
        cards = self._backend.adapters(self._room.principal(request))
        models = {card.model for card in cards}
        where = {model: await self._backend.adapter_residency(model) for model in models}
        absent = Residency.ABSENT
        entries = [
            _fields(card) | {"residency": where[card.model].get(card.digest, absent).value}
            for card in cards
        ]
        return json_response(AdapterList(entries))

    async def get_adapter(self, request: Request) -> Response:
        principal, ref = self._asked(request)
        return _adapter(await self._backend.describe_adapter(principal, ref))

    async def load_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.strict_body(request, AdapterBody)
        report = await self._backend.load_adapter(
            principal,
            model=self._base_model(body.model, principal),
            name=body.name,
            path=body.path,
            task_id=body.task_id,
            replace=bool(body.replace),
            dry_run=bool(body.dry_run),
            canary=bool(body.canary),
        )
        return _adapter(report, status=200 if report.is_dry_run else 201)

    async def delete_adapter(self, request: Request) -> Response:
        principal, ref = self._asked(request)
        unloaded = await self._backend.unload_adapter(principal, ref, _mode(request))
        return json_response(
            AdapterDeleted(
                name=unloaded.name,
                object="alias" if unloaded.is_alias else "adapter",
                num_ended=unloaded.num_ended,
            )
        )

    async def rollback(self, request: Request) -> Response:
        principal, ref = self._asked(request)
        body = await self._room.strict_body(request, RollbackBody)
        return _adapter(await self._backend.rollback_adapter(principal, ref, body.version))

    async def pin(self, request: Request) -> Response:
        principal, ref = self._asked(request)
        body = await self._room.strict_body(request, PinBody)
        is_pinned = body.pinned is not False
        return json_response(
            await self._backend.pin_adapter(principal, ref, body.version, is_pinned=is_pinned)
        )

    async def alias(self, request: Request) -> Response:
        principal, ref = self._asked(request)
        body = await self._room.strict_body(request, AliasBody)
        return _adapter(
            await self._backend.alias_adapter(
                principal, ref, body.alias, replace=bool(body.replace)
            )
        )

    async def load_lora_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, LoadLoraBody)
        if not body.lora_name or not body.lora_path:
            return _refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        load = self._backend.load_adapter(
            principal,
            model=self._base_model(body.base_model_name, principal),
            name=body.lora_name,
            path=body.lora_path,
            replace=bool(body.load_inplace),
        )
        return await _in_vllms_words(load, body.lora_name, "added")

    async def unload_lora_adapter(self, request: Request) -> Response:
        principal = self._room.principal(request)
        body = await self._room.body(request, UnloadLoraBody)
        if not body.lora_name:
            return _refusal(400, "'lora_name' needs to be provided to unload a LoRA adapter.")
        return await _in_vllms_words(
            self._unload(body.lora_name, principal), body.lora_name, "removed"
        )

    async def _unload(self, name: str, principal: Principal) -> None:
        await self._backend.unload_adapter(principal, self._ref(name, principal))

    def _asked(self, request: Request) -> tuple[Principal, AdapterRef]:
        principal = self._room.principal(request)
        return principal, self._ref(request.path_params["name"], principal)

    def _ref(self, name: str, principal: Principal) -> AdapterRef:
        """Raises AdapterNotFoundError if the name means nothing, or a base model."""
        try:
            card, key = self._backend.find(name, principal)
        except ModelNotFoundError as error:
            raise AdapterNotFoundError(error.message, param="name") from None
        if key is None:
            raise AdapterNotFoundError(f"{name!r} is a base model, not an adapter", param="name")
        return AdapterRef(card.name, principal.tenant, key)

    def _base_model(self, name: str | None, principal: Principal) -> str:
        target = self._room.target(name, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {name!r} is an adapter", param="model"
            )
        return target.model.name


def _fields(card: AdapterCard) -> dict[str, Any]:
    return {"object": "adapter", **msgspec.to_builtins(card)}


def _adapter(card: AdapterCard, status: int = 200) -> Response:
    body = msgspec.json.encode(_fields(card))
    return Response(body, status_code=status, media_type="application/json")


def _mode(request: Request) -> UnloadMode:
    asked = request.query_params.get("mode", UnloadMode.DRAIN.value)
    try:
        return UnloadMode(asked)
    except ValueError:
        known = " or ".join(UnloadMode)
        raise InvalidParameterError(f"mode must be {known}, got {asked!r}", param="mode") from None


async def _in_vllms_words(work: Awaitable[Any], name: str, done: str) -> Response:
    """Clients of vLLM look for these sentences. Other errors are answered as everywhere."""
    try:
        await work
    except AdapterExistsError:
        return _refusal(
            400,
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
        )
    except AdapterNotFoundError:
        return _refusal(404, f"The lora adapter '{name}' cannot be found.")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


def _refusal(status: int, message: str) -> Response:
    code = "adapter_not_found" if status == 404 else "invalid_parameter"
    return json_error(status, ErrorDetail(message, INVALID, "lora_name", code))
