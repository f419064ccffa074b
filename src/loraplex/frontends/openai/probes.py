"""vLLM's routes for load balancers: /health, /ping and /version."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import NotReadyError
from loraplex.core.version import __version__
from loraplex.frontends.openai.context import OpenAIContext, json_response
from loraplex.frontends.openapi.operation import ResponseDoc, described, json_of


class Version(msgspec.Struct, frozen=True):
    version: str


class ProbeEndpoints:
    """Health routes. They need no key and return only public facts."""

    def __init__(self, context: OpenAIContext) -> None:
        self._context = context

    @described(ResponseDoc(200), tag="health", errors=(NotReadyError,))
    async def health(self, request: Request) -> Response:
        """Empty if requests would be served now; else 503 and the reason."""
        del request
        health = self._context.backend.health()
        if not health.ready:
            raise NotReadyError(health.reason)
        return Response(status_code=200)

    @described(json_of(Version), tag="health")
    async def version(self, request: Request) -> Response:
        """The version of the server."""
        del request
        return json_response(Version(__version__))
