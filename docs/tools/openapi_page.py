"""docs/openapi.json: the document that a server with keys gives at /openapi.json."""

from collections.abc import Mapping

from starlette.testclient import TestClient

from loraplex.app.http_app import DOCUMENT_PATH
from loraplex.core.principal import LOCAL, Principal
from support.described_app import described_app
from support.echo_service import EchoService


def openapi_page() -> str:
    app = described_app(EchoService(), _with_a_key)
    return TestClient(app).get(DOCUMENT_PATH).text + "\n"


def _with_a_key(headers: Mapping[str, str]) -> Principal:
    del headers
    return LOCAL
