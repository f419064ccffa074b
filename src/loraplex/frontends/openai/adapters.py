"""/v1/adapters, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter.

vLLM's two routes return vLLM's statuses and texts; ours return more.
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
    LoraplexError,
    ModelNotFoundError,
    brief,
)
from loraplex.core.principal import Principal
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.adapter_queries import (
    MAX_VERSION,
    OF_LIST,
    VERSION,
    number,
    page_query,
)
from loraplex.frontends.openai.adapter_schema import (
    AdapterBody,
    AdapterList,
    AdapterTrial,
    AliasBody,
    ListedAdapter,
    ListPage,
    LoadedAdapter,
    LoadLoraBody,
    NamedAdapter,
    PinBody,
    RollbackBody,
    ShownAdapter,
    UnloadLoraBody,
    trial_of,
)
from loraplex.frontends.openai.context import OpenAIContext, json_response, tagged_response
from loraplex.frontends.openai.errors import INVALID, ErrorDetail, json_error
from loraplex.frontends.openai.responses import AdapterDeleted
from loraplex.frontends.openai.unsupported import refuse_unknown
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    Parameter,
    ResponseDoc,
    described,
    json_body,
    json_of,
    text,
)
from loraplex.frontends.streams import until_disconnect
from loraplex.serving.adapter_cards import UnloadMode, VersionCard, card_as
from loraplex.serving.wire_request import note_subject

_MODE = Parameter(
    "mode",
    "What becomes of requests that run with it; drain if it is absent.",
    {"enum": [mode.value for mode in UnloadMode]},
)


class AdapterEndpoints:
    """Names with slashes work: a name is the rest of the path, up to an action."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context
        self._backend = context.backend

    @described(
        json_of(AdapterList),
        json_of(ListPage),
        ResponseDoc(304, note="The page is the one whose ETag the client sent in If-None-Match."),
        query=OF_LIST,
        tag="adapters",
        errors=ANY_ERROR,
    )
    async def list_adapters(self, request: Request) -> Response:
        """Every adapter that the tenant may see; with any of the parameters a page of them."""
        principal = self._context.principal(request)
        query = page_query(request.query_params)
        if query is not None:
            page = await self._backend.adapter_page(principal, query)
            return tagged_response(request, ListPage(**msgspec.structs.asdict(page)))
        cards = self._backend.adapters(principal)
        models = {card.model for card in cards}
        where = {model: await self._backend.model(model).adapter_residency() for model in models}
        absent = Residency.ABSENT
        entries = [
            card_as(ListedAdapter, card, residency=where[card.model].get(card.digest, absent))
            for card in cards
        ]
        return json_response(AdapterList(entries))

    @described(json_of(ShownAdapter), query=(VERSION,), tag="adapters", errors=ANY_ERROR)
    async def get_adapter(self, request: Request) -> Response:
        """All that is known of an adapter, or of a version in its history."""
        principal, ref = await self._reference(request)
        query = request.query_params
        version = number(query, "version", 0, 1, MAX_VERSION) if "version" in query else None
        details = await self._backend.adapter_admin.describe(principal, ref, version)
        return json_response(card_as(ShownAdapter, details))

    @described(
        json_of(LoadedAdapter, 201, "The adapter may be named."),
        json_of(LoadedAdapter, 200, "A dry run: nothing was registered."),
        json_of(AdapterTrial, 200, "A dry run with details."),
        body=json_body(AdapterBody),
        tag="adapters",
        errors=ANY_ERROR,
    )
    async def load_adapter(self, request: Request) -> Response:
        """Register an adapter under a name."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, AdapterBody, refuse_unknown)
        if body.details:
            return await self._try_out(request, principal, body)
        load = self._backend.adapter_admin.load(
            principal,
            model=await self._base_model(body.model, principal),
            name=body.name,
            path=body.source,
            task_id=body.task_id,
            replace=bool(body.replace),
            dry_run=bool(body.dry_run),
            canary=bool(body.canary),
        )
        try:
            report = await until_disconnect(request.receive, load)
        except LoraplexError as error:
            raise as_sent(error, {"path": "source"}) from None
        return json_response(card_as(LoadedAdapter, report), 200 if report.is_dry_run else 201)

    async def _try_out(self, request: Request, principal: Principal, body: AdapterBody) -> Response:
        if not body.dry_run:
            raise InvalidParameterError("details needs dry_run: true", param="details")
        trial = self._backend.adapter_admin.try_out(
            principal,
            model=await self._base_model(body.model, principal),
            name=body.name,
            path=body.source,
            task_id=body.task_id,
            replace=bool(body.replace),
            canary=bool(body.canary),
        )
        try:
            report = await until_disconnect(request.receive, trial)
        except LoraplexError as error:
            raise as_sent(error, {"path": "source"}) from None
        return json_response(trial_of(report))

    @described(json_of(AdapterDeleted), query=(_MODE,), tag="adapters", errors=ANY_ERROR)
    async def delete_adapter(self, request: Request) -> Response:
        """Forget a name."""
        principal, ref = await self._reference(request)
        unloaded = await self._backend.adapter_admin.unload(principal, ref, _mode(request))
        return json_response(
            AdapterDeleted(
                name=unloaded.name,
                object="alias" if unloaded.is_alias else "adapter",
                digest=unloaded.digest,
                version=unloaded.version,
                num_ended=unloaded.num_ended,
            )
        )

    @described(
        json_of(NamedAdapter), body=json_body(RollbackBody), tag="adapters", errors=ANY_ERROR
    )
    async def rollback(self, request: Request) -> Response:
        """An older version of an adapter becomes the present one."""
        principal, ref = await self._reference(request)
        body = await self._context.parse(request, RollbackBody, refuse_unknown)
        card = await self._backend.adapter_admin.rollback(principal, ref, body.version)
        return json_response(card_as(NamedAdapter, card))

    @described(json_of(VersionCard), body=json_body(PinBody), tag="adapters", errors=ANY_ERROR)
    async def pin(self, request: Request) -> Response:
        """Keep a version in the memory of the device, or no longer."""
        principal, ref = await self._reference(request)
        body = await self._context.parse(request, PinBody, refuse_unknown)
        is_pinned = body.pinned is not False
        return json_response(
            await self._backend.adapter_admin.pin(principal, ref, body.version, is_pinned=is_pinned)
        )

    @described(json_of(NamedAdapter), body=json_body(AliasBody), tag="adapters", errors=ANY_ERROR)
    async def alias(self, request: Request) -> Response:
        """Another name for an adapter."""
        principal, ref = await self._reference(request)
        body = await self._context.parse(request, AliasBody, refuse_unknown)
        card = await self._backend.adapter_admin.alias(
            principal, ref, body.alias, replace=bool(body.replace)
        )
        return json_response(card_as(NamedAdapter, card))

    @described(text(), body=json_body(LoadLoraBody), tag="adapters", errors=ANY_ERROR)
    async def load_lora_adapter(self, request: Request) -> Response:
        """Register an adapter, as vLLM does it."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, LoadLoraBody)
        if not body.lora_name or not body.lora_path:
            return _refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        load = self._backend.adapter_admin.load(
            principal,
            model=await self._base_model(body.base_model_name, principal),
            name=body.lora_name,
            path=body.lora_path,
            replace=bool(body.load_inplace),
        )
        work = until_disconnect(request.receive, load)
        return await _vllm_response(work, body.lora_name, "added")

    @described(text(), body=json_body(UnloadLoraBody), tag="adapters", errors=ANY_ERROR)
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Forget an adapter, as vLLM does it."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, UnloadLoraBody)
        if not body.lora_name:
            return _refusal(400, "'lora_name' needs to be provided to unload a LoRA adapter.")
        return await _vllm_response(
            self.unload(body.lora_name, principal), body.lora_name, "removed"
        )

    async def unload(self, name: str, principal: Principal) -> None:
        """Forget a name. Raises AdapterNotFoundError."""
        await self._backend.adapter_admin.unload(principal, await self._ref(name, principal))

    async def _reference(self, request: Request) -> tuple[Principal, AdapterRef]:
        principal = self._context.principal(request)
        return principal, await self._ref(request.path_params["name"], principal)

    async def _ref(self, name: str, principal: Principal) -> AdapterRef:
        """Raises AdapterNotFoundError if the name means nothing, or a base model."""
        note_subject("", name, is_change=False)
        try:
            card, key = await self._backend.find(name, principal)
        except ModelNotFoundError as error:
            raise AdapterNotFoundError(error.message, param="name") from None
        if key is None:
            raise AdapterNotFoundError(f"{name!r} is a base model, not an adapter", param="name")
        return AdapterRef(card.name, principal.tenant, key)

    async def _base_model(self, name: str | None, principal: Principal) -> str:
        target = await self._context.target(name, principal)
        if target.key is not None:
            raise InvalidParameterError(
                f"model must be a base model; {name!r} is an adapter", param="model"
            )
        return target.model.name


def _mode(request: Request) -> UnloadMode:
    mode = request.query_params.get("mode", UnloadMode.DRAIN.value)
    try:
        return UnloadMode(mode)
    except ValueError:
        known = " or ".join(UnloadMode)
        raise InvalidParameterError(f"mode must be {known}, got {mode!r}", param="mode") from None


async def _vllm_response(work: Awaitable[Any], name: str, done: str) -> Response:
    """Respond as vLLM: its clients look for these texts. Other errors are returned as usual."""
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
    except LoraplexError as error:
        raise as_sent(error, {"path": "lora_path"}) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")


def _refusal(status: int, message: str) -> Response:
    code = "adapter_not_found" if status == 404 else "invalid_parameter"
    return json_error(status, ErrorDetail(brief(message), INVALID, "lora_name", code))
