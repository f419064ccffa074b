"""What of the generation routes a server does another server's way. The base class is OpenAI's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from loraplex.core.output import RequestOutput
from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_fields import Target
from loraplex.frontends.openai.errors import OPENAI_ERRORS, ErrorWriter
from loraplex.frontends.openai.expanded_prompt import ExpandedPromptWriter
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, GenerationBody
from loraplex.frontends.streams import IndexedOutput

if TYPE_CHECKING:
    from loraplex.frontends.openai.context import OpenAIContext
    from loraplex.frontends.openai.logprobs import TokenTexts
    from loraplex.frontends.openai.writers import Call


class ResponseWriter(Protocol):
    """Writer of the response to one call: whole, or chunk by chunk."""

    def headers(self, first: IndexedOutput) -> Mapping[str, str]: ...

    def chunks(self, item: IndexedOutput) -> Iterable[Any]: ...

    def last_chunks(self) -> Iterable[Any]: ...

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """A msgspec.Struct, as the chunks are."""
        ...


class Dialect:
    """Stateless: every call of a server goes through the same one."""

    errors: ErrorWriter = OPENAI_ERRORS
    shows_schema = False
    """Whether a chat template gets the schema of response_format by default."""
    unready_status = 503
    """Status of the health routes while not ready."""
    is_ready_at_once = False
    """Whether GET /v1/health/ready succeeds even while the server starts or drains."""

    async def completion_body(self, context: "OpenAIContext", request: Request) -> CompletionBody:
        return await context.body(request, CompletionBody)

    async def chat_body(self, context: "OpenAIContext", request: Request) -> ChatBody:
        return await context.body(request, ChatBody)

    def target(
        self, context: "OpenAIContext", body: GenerationBody, principal: Principal
    ) -> Target:
        return context.target(body.model, principal)

    def rendering(self, body: ChatBody) -> dict[str, Any]:
        """Arguments of Backend.render_chat that go before those of the route."""
        shows = body.include_json_schema_in_prompt
        arguments = _effort(body) | (body.chat_template_kwargs or {})
        if shows or (shows is None and self.shows_schema):
            schema = schema_of(body.response_format)
            arguments = ({} if schema is None else {"json_schema": schema}) | arguments
        hidden = {"tools": None} if shows is False else {}
        return {"template_kwargs": arguments or None, **hidden}

    def writer(
        self, writer: ResponseWriter, call: "Call", body: GenerationBody, texts: "TokenTexts"
    ) -> ResponseWriter:
        """Writer that replaces the default one."""
        del call
        return ExpandedPromptWriter(writer, texts) if body.return_expanded_prompt else writer


OPENAI = Dialect()


def _effort(body: ChatBody) -> dict[str, Any]:
    """Variables that templates read."""
    if body.reasoning_effort is None:
        return {}
    off = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return {"reasoning_effort": body.reasoning_effort, **off}


def schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema in it; None if there is none."""
    inner = (response_format or {}).get("json_schema")
    return inner.get("schema") if isinstance(inner, dict) else None
