"""docs/openapi.json: the document that a server with keys gives at /openapi.json."""

from starlette.testclient import TestClient

from loraplex.app.http_app import DOCUMENT_PATH
from loraplex.core.principal import LOCAL
from support.described_app import described_app
from support.echo_service import EchoService


def openapi_page() -> str:
    with_keys = described_app(EchoService(), authenticate=lambda _headers: LOCAL)
    return TestClient(with_keys).get(DOCUMENT_PATH).text + "\n"
