"""The checks of the HTTP middleware, one by one, and their order."""

import pytest
from starlette.responses import PlainTextResponse

from loraplex.core.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from loraplex.core.principal import LOCAL, Principal, Rights
from loraplex.frontends.middleware import checked, host_check, key_check, page_check
from support.naming import naming


def scope_of(method="POST", path="/v1/x", **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": raw}


class TestHosts:
    @pytest.mark.parametrize(
        "host",
        ["localhost", "a.localhost:8000", "127.0.0.1:80", "[::1]:80", "M.example.", "m.example:1"],
    )
    def test_known(self, host):
        host_check(["m.example"])(scope_of(host=host))

    @pytest.mark.parametrize("host", ["evil.example", "m.example.evil", "localhost.evil", ""])
    def test_unknown(self, host):
        with pytest.raises(InvalidRequestError, match=naming("allowed_hosts")):
            host_check(["m.example"])(scope_of(host=host))

    def test_any(self):
        host_check(["*"])(scope_of(host="evil.example"))

    def test_none(self):
        host_check([])(scope_of())


class TestPages:
    check = staticmethod(page_check(["https://ours.example"]))

    def test_of_others_may_not_send_a_form(self):
        with pytest.raises(PermissionDeniedError, match=naming("cors_origins", "evil.example")):
            self.check(scope_of(origin="https://evil.example"))

    @pytest.mark.parametrize(
        "scope",
        [
            scope_of("GET", origin="https://evil.example"),
            scope_of(),
            scope_of(origin="https://ours.example"),
            scope_of(origin="https://evil.example", content_type="application/json"),
            scope_of(origin="http://a.example", host="a.example"),
            scope_of(origin="null", sec_fetch_site="same-origin"),
        ],
    )
    def test_what_may_be_sent(self, scope):
        self.check(scope)


_TENANT = Principal("acme", Rights(operator=False))


def _without_key(_headers):
    raise UnauthenticatedError("no key")


class TestKeys:
    def test_open_paths_and_pages(self):
        check = key_check(_without_key, open_paths=["/ping"], open_pages=["/console/"])
        check(scope_of(path="/ping"))
        check(scope_of("GET", "/console/"))
        for closed in (scope_of(path="/console/"), scope_of(path="/ping/")):
            with pytest.raises(UnauthenticatedError):
                check(closed)

    def test_of_operators(self):
        check = key_check(lambda _headers: _TENANT, operators_only_to="see the metrics")
        with pytest.raises(PermissionDeniedError, match=naming("see the metrics")):
            check(scope_of())
        key_check(lambda _headers: LOCAL, operators_only_to="see the metrics")(scope_of())


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_first_check_that_fails_decides(kind):
    def fail(_scope):
        raise InvalidRequestError("first")

    sent = []

    async def send(message):
        sent.append(message)

    app = checked(
        PlainTextResponse("served"),
        (host_check(["*"]), fail, key_check(_without_key)),
        lambda path, error: PlainTextResponse(f"{path} {error.message}", 400),
    )
    await app({**scope_of(host="a"), "type": kind}, None, send)
    assert sent[-1]["body"] == b"/v1/x first"
