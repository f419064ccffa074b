"""docs/openapi.json: the document that a server with keys gives at /openapi.json."""

import asyncio
from collections.abc import Mapping

from starlette.types import Message

from loraplex.app.http_app import DOCUMENT_PATH
from loraplex.core.principal import LOCAL, Principal
from support.described_app import described_app
from support.echo_service import EchoService


def openapi_page() -> str:
    return asyncio.run(_document()).decode() + "\n"


def _with_a_key(headers: Mapping[str, str]) -> Principal:
    del headers
    return LOCAL


async def _document() -> bytes:
    app = described_app(EchoService(), _with_a_key)
    parts: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "GET",
        "path": DOCUMENT_PATH,
        "headers": [],
        "query_string": b"",
    }
    await app(scope, receive, send)
    return b"".join(parts)
