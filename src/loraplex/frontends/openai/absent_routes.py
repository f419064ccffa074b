"""Routes of OpenAI, vLLM and SGLang that are not served: a client gets an error that names what
is served instead. 404, because clients try again after a 5xx.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import brief
from loraplex.core.support import Feature, Support
from loraplex.frontends.openai.context import Endpoint
from loraplex.frontends.openai.errors import INVALID, ErrorDetail, json_error

CODE = "unsupported_route"
_GENERATES = "this server generates text: use /v1/completions or /v1/chat/completions"
_VECTORS: Final = "vectors of texts are at /v1/embeddings"
_KEEPS_NOTHING = "use previous_response_id of /v1/responses, or send the whole conversation"


class AbsentRoute(NamedTuple):
    """A path, and all below it."""

    path: str
    instead: str = _GENERATES

    @property
    def feature(self) -> Feature:
        return Feature(self.path, Support.REFUSED, self.instead)


_READ: Final = "the document of this API is /openapi.json; a browser opens /console/"

ABSENT = (
    AbsentRoute("/docs", _READ),
    AbsentRoute("/redoc", _READ),
    AbsentRoute("/v1/moderations"),
    AbsentRoute("/v1/images"),
    AbsentRoute("/v1/audio"),
    AbsentRoute("/v1/videos"),
    AbsentRoute("/v1/realtime", "use /v1/chat/completions with stream"),
    AbsentRoute("/v1/batches", "send the requests one by one: they are batched as they come"),
    AbsentRoute("/v1/files", "send what a file holds in a message"),
    AbsentRoute("/v1/uploads", "send what a file holds in a message"),
    AbsentRoute("/v1/vector_stores", "send what a search found in a message"),
    AbsentRoute("/v1/fine_tuning", "train elsewhere, and load the adapter: POST /v1/adapters"),
    AbsentRoute("/v1/evals", "POST /v1/compare shows the outputs of many adapters side by side"),
    AbsentRoute("/v1/assistants", _KEEPS_NOTHING),
    AbsentRoute("/v1/threads", _KEEPS_NOTHING),
    AbsentRoute("/v1/conversations", _KEEPS_NOTHING),
    AbsentRoute("/v1/containers", _KEEPS_NOTHING),
    AbsentRoute("/v1/chatkit", _KEEPS_NOTHING),
    AbsentRoute("/v1/skills", _KEEPS_NOTHING),
    AbsentRoute("/v1/organization", "tenants and their keys are in the server's settings"),
    AbsentRoute("/classify_batch", "/classify takes a list of texts"),
    AbsentRoute("/embed_all", _VECTORS),
    AbsentRoute("/embed_sparse", _VECTORS),
    AbsentRoute("/v1/embed", "use /v2/embed"),
    AbsentRoute("/inference/v1/generate", "use /v1/completions with token ids"),
    AbsentRoute("/tokenizer_info", "use /tokenize and /detokenize"),
    AbsentRoute("/load_lora_adapter", "use /v1/load_lora_adapter"),
    AbsentRoute("/unload_lora_adapter", "use /v1/unload_lora_adapter"),
)


def absent_endpoints() -> Iterator[tuple[str, Endpoint]]:
    """Return the paths and their endpoints."""
    for route in ABSENT:
        endpoint = _refusal(route)
        yield route.path, endpoint
        yield f"{route.path}/{{rest:path}}", endpoint


def _refusal(route: AbsentRoute) -> Endpoint:
    async def refuse(request: Request) -> Response:
        message = brief(f"there is no {request.url.path} here: {route.instead}")
        return json_error(404, ErrorDetail(message, INVALID, None, CODE))

    return refuse
