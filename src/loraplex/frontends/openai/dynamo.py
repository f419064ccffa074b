"""/v1/loras of a Dynamo worker, by which an operator loads the adapters of DynamoModel objects.

The operator sends a load again whenever it looks at an object, so a load of a known name replaces
it: the same bytes change nothing.
"""

import zlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import LoraplexError
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.adapter_schema import DynamoLoadBody
from loraplex.frontends.openai.adapters import AdapterEndpoints
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openapi.operation import ANY_ERROR, described, json_body, json_of
from loraplex.frontends.streams import until_disconnect


class DynamoLoras(msgspec.Struct, frozen=True):
    """Numbers of the adapters by name."""

    loras: dict[str, int]
    count: int
    status: str = "success"


class DynamoLora(msgspec.Struct, frozen=True):
    message: str
    lora_name: str
    lora_id: int
    status: str = "success"


class DynamoEndpoints:
    """Loads and unloads with the rights and limits of the other routes that manage adapters."""

    def __init__(self, context: OpenAIContext, adapters: AdapterEndpoints) -> None:
        self._context = context
        self._adapters = adapters

    @described(json_of(DynamoLoras), tag="adapters", errors=ANY_ERROR)
    async def list_loras(self, request: Request) -> Response:
        """The adapters that the tenant may see, as Dynamo lists them."""
        cards = self._context.backend.adapters(self._context.principal(request))
        loras = {card.name: lora_id(card.name) for card in cards}
        return json_response(DynamoLoras(loras, len(loras)))

    @described(
        json_of(DynamoLora), body=json_body(DynamoLoadBody), tag="adapters", errors=ANY_ERROR
    )
    async def load_lora(self, request: Request) -> Response:
        """Register an adapter or its new content, as Dynamo does it."""
        principal = self._context.principal(request)
        body = await self._context.parse(request, DynamoLoadBody)
        load = self._context.backend.adapter_admin.load(
            principal,
            model=(await self._context.target(None, principal)).model.name,
            name=body.lora_name,
            path=body.source.uri,
            replace=True,
        )
        try:
            await until_disconnect(request.receive, load)
        except LoraplexError as error:
            raise as_sent(error, {"path": "source.uri"}) from None
        return _done(body.lora_name, "loaded")

    @described(json_of(DynamoLora), tag="adapters", errors=ANY_ERROR)
    async def unload_lora(self, request: Request) -> Response:
        """Forget an adapter, as Dynamo does it."""
        name = request.path_params["name"]
        await self._adapters.unload(name, self._context.principal(request))
        return _done(name, "unloaded")


def lora_id(name: str) -> int:
    """Return the number of an adapter: always the same for a name, as with Dynamo."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def _done(name: str, done: str) -> Response:
    message = f"LoRA adapter '{name}' {done} successfully"
    return json_response(DynamoLora(message, name, lora_id(name)))
