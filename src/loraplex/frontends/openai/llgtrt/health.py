"""llgtrt's health routes: process alive, ready for requests, model alive."""

from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.errors import LoraplexError, RateLimitedError
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.openai.context import OpenAIContext
from loraplex.frontends.openapi.operation import OF_NAMES, ResponseDoc, described, text
from loraplex.frontends.streams import gather_all, until_disconnect

GOOD: Final = "Check complete"
BAD: Final = "Check failed"
PROBE_PROMPT: Final = "Hi"
PROBE_TOKENS: Final = 2
PROBE_SECONDS: Final = 30.0
PROBE_PRIORITY: Final = -10
"""Before others: lower is sooner. It is llgtrt's 10, whose higher numbers are sooner."""


class LlgtrtHealth:
    def __init__(self, context: OpenAIContext) -> None:
        self._context = context
        self._dialect = context.options.dialect

    @described(text(), text(503, "The server does not serve."), tag="health")
    async def live(self, request: Request) -> Response:
        """Whether the process is alive."""
        del request
        return self._response(is_good=self._context.backend.health().live)

    @described(ResponseDoc(200), text(503, "Why it is not."), tag="health")
    async def ready(self, request: Request) -> Response:
        """Readiness; else the reason: starting, draining, or an engine that is restarting."""
        del request
        health = self._context.backend.health()
        if health.ready or self._dialect.is_ready_at_once:
            return Response(status_code=200)
        return PlainTextResponse(health.reason, self._dialect.unready_status)

    @described(text(), text(503, "It has not responded."), tag="health", errors=OF_NAMES)
    async def model(self, request: Request) -> Response:
        """Generate two tokens with the first model, ahead of the queue, as the caller's request."""
        principal = self._context.principal(request)
        backend = self._context.backend
        probe = GenerateRequest(
            request_id=backend.new_request_id(),
            model=(await self._context.target(None, principal)).model.name,
            prompt=PROBE_PROMPT,
            task=Generate(SamplingParams(max_tokens=PROBE_TOKENS)),
            priority=PROBE_PRIORITY,
            timeout_seconds=PROBE_SECONDS,
        )
        try:
            await until_disconnect(request.receive, gather_all(backend, (probe,), principal))
        except RateLimitedError:
            raise  # of the tenant: the model may be well
        except LoraplexError:
            return self._response(is_good=False)
        return self._response(is_good=True)

    def _response(self, *, is_good: bool) -> Response:
        return PlainTextResponse(
            GOOD if is_good else BAD, 200 if is_good else self._dialect.unready_status
        )
