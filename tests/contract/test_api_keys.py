"""API keys over HTTP and gRPC: every route and RPC requires one; the official clients send it."""

import re
from unittest.mock import AsyncMock

import grpc
import httpx
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from starlette.applications import Starlette
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from loraplex.app.access import OPEN_PATHS, guarded, guarded_metrics
from loraplex.compat.client import text_client
from loraplex.compat.client.programs import TEXT_FLAGS
from loraplex.compat.client.wire import grpc_client
from loraplex.core.errors import ConfigError, RateLimitedError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import by_api_key, everyone_is_local
from loraplex.frontends.kserve.grpc.calls import OPEN_RPCS
from loraplex.frontends.kserve.http.routes import kserve_routes
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.openai.app import openai_fallback_routes, openai_routes
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import metrics_app
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from support.naming import naming
from support.program_options import program_options
from support.served import served
from support.served_triton import served_triton

OPERATOR, TENANT = new_key(), new_key()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def authenticate():
    return by_api_key(ApiKeys(None, f"{OPERATOR} acme:{TENANT}"))


@pytest.fixture
def backend():
    return EchoService()


@pytest.fixture
def routes(backend, authenticate):
    """Return the routes of every protocol."""
    return [
        *openai_routes(backend, None, authenticate),
        *kserve_routes(TritonService(backend), authenticate=authenticate),
        *health_routes(backend, AsyncMock(return_value={}), authenticate),
        *openai_fallback_routes(),
    ]


@pytest.fixture
def app(routes):
    """Return an application without the access guard."""
    application = Starlette()
    application.router.routes.extend(routes)
    return application


@pytest.fixture
def paths(routes):
    """Return (method, path with its parameters filled) of every route."""
    return {
        (method, re.sub(r"\{\w+(:path)?\}", "x", route.path))
        for route in routes
        for method in route.methods or route.endpoint._handlers or ("GET",)
    }


def client_of(application):
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://x")


class TestHttp:
    async def test_no_path_is_served_without_a_key(self, app, paths, authenticate):
        guard = guarded(app, authenticate, ServerConfig())
        async with client_of(guard) as client:
            seen = 0
            for method, path in {*paths, ("GET", "/nowhere"), ("POST", "//x")}:
                for headers in ({}, bearer("x"), bearer(TENANT[:-1]), {"authorization": TENANT}):
                    response = await client.request(method, path, headers=headers)
                    if path in OPEN_PATHS:
                        assert response.status_code != 401, path
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert TENANT[:-1] not in response.text
                    seen += 1
        assert seen > 150

    async def test_health_behind_a_key(self, app, authenticate):
        guard = guarded(app, authenticate, ServerConfig(health_needs_key=True))
        async with client_of(guard) as client:
            for path in OPEN_PATHS:
                assert (await client.get(path)).status_code == 401
            response = await client.get("/v2/health/live", headers=bearer(TENANT))
            assert response.status_code == 200

    async def test_endpoints_check_the_key_themselves(self, app, paths):
        """Call routes without the guard: those that run for a tenant must identify the tenant."""
        unprotected = set()
        async with client_of(app) as client:
            for method, path in paths:
                if method in ("GET", "POST", "DELETE"):
                    response = await client.request(method, path, json={})
                    if response.status_code not in (401, 404, 405):
                        unprotected.add(path)
        assert unprotected <= {*OPEN_PATHS, "/ping", "/version", "/v2"}

    async def test_each_protocol_has_its_own_error_format(self, app, authenticate):
        guard = guarded(app, authenticate, ServerConfig())
        async with client_of(guard) as client:
            openais = (await client.get("/v1/models")).json()["error"]
            assert openais["code"] == "invalid_api_key"
            assert openais["type"] == "authentication_error"
            assert isinstance((await client.get("/v2/models/stats")).json()["error"], str)

    @pytest.mark.parametrize("path", ["/v1/iterations", "/v1/memory", "/v1/internal/stats"])
    async def test_operators_routes(self, app, path):
        async with client_of(app) as client:
            assert (await client.get(path)).status_code == 401
            refused = await client.get(path, headers=bearer(TENANT))
            assert refused.status_code == 403
            assert re.search(naming("operator"), refused.text)
            assert (await client.get(path, headers=bearer(OPERATOR))).status_code in (200, 503)

    async def test_the_description_of_a_key(self, app):
        async with client_of(app) as client:
            assert (await client.get("/v1/me")).status_code == 401
            me = (await client.get("/v1/me", headers=bearer(TENANT))).json()
            assert (me["tenant"], me["operator"]) == ("acme", False)
            rights = {"use": ["*"], "list": ["*"], "manage": [], "models": ["*"]}
            assert me["rights"] == rights
            assert me["limits"]["requests_per_minute"] is None
            assert me["usage"]["concurrent_requests"] == 0
            operator = (await client.get("/v1/me", headers=bearer(OPERATOR))).json()
            assert (operator["tenant"], operator["operator"]) == ("default", True)
            assert operator["rights"]["manage"] == ["*"]

    async def test_tritons_statistics_are_operators(self, app):
        async with client_of(app) as client:
            response = await client.get("/v2/models/stats", headers=bearer(TENANT))
            assert response.status_code == 403
            response = await client.get("/v2/models/stats", headers=bearer(OPERATOR))
            assert response.status_code == 200

    async def test_the_metrics_port(self, backend, authenticate):
        application = guarded_metrics(metrics_app(backend, RequestMetrics()), authenticate)
        async with client_of(application) as client:
            for headers, status in [({}, 401), (bearer(TENANT), 403), (bearer(OPERATOR), 200)]:
                assert (await client.get("/metrics", headers=headers)).status_code == status

    async def test_other_spellings_of_the_scheme(self, app):
        async with client_of(app) as client:
            for value in (f"bearer {TENANT}", f"BEARER   {TENANT}  "):
                response = await client.get("/v1/models", headers={"authorization": value})
                assert response.status_code == 200
            for value in (f"Basic {TENANT}", "Bearer", "Bearer ", f"Bearer {TENANT} x"):
                response = await client.get("/v1/models", headers={"authorization": value})
                assert response.status_code == 401

    def test_the_openai_client(self, app, authenticate):
        with served(guarded(app, authenticate, ServerConfig())) as url:
            official = openai.OpenAI(base_url=f"{url}/v1", api_key=TENANT, max_retries=0)
            assert official.models.list().data
            with pytest.raises(openai.AuthenticationError) as raised:
                official.with_options(api_key="sk-wrong").models.list()
            assert raised.value.code == "invalid_api_key"

    async def test_a_rate_limit(self, app, backend):
        backend.plant(RateLimitedError("too many", retry_after_seconds=2.2))
        backend.plant(RateLimitedError("too many", retry_after_seconds=2.2))
        async with client_of(app) as client:
            body = {"model": "echo", "prompt": "x"}
            response = await client.post("/v1/completions", json=body, headers=bearer(TENANT))
            assert response.status_code == 429
            assert response.headers["retry-after"] == "3"
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            response = await client.post(
                "/v2/models/ensemble/generate",
                json={"text_input": "x", "max_tokens": 1},
                headers=bearer(TENANT),
            )
            assert (response.status_code, response.headers["retry-after"]) == (429, "3")


PREFLIGHT = {
    "origin": "https://app.example.org",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


class TestCors:
    async def test_off_by_default(self, app, authenticate):
        async with client_of(guarded(app, authenticate, ServerConfig())) as client:
            response = await client.options("/v1/completions", headers=PREFLIGHT)
            assert "access-control-allow-origin" not in response.headers

    async def test_for_the_configured_origins(self, app, authenticate):
        settings = ServerConfig(cors_origins=("https://app.example.org",))
        async with client_of(guarded(app, authenticate, settings)) as client:
            response = await client.options("/v1/completions", headers=PREFLIGHT)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://app.example.org"
            assert "authorization" in response.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in response.headers
            other = {**PREFLIGHT, "origin": "https://evil.example"}
            response = await client.options("/v1/completions", headers=other)
            assert "access-control-allow-origin" not in response.headers
            # A page must see why it was refused.
            response = await client.get("/v1/models", headers={"origin": PREFLIGHT["origin"]})
            assert response.status_code == 401
            assert response.headers["access-control-allow-origin"] == PREFLIGHT["origin"]


FORM = {"origin": "https://evil.example", "content-type": "text/plain"}


class TestStrangersPages:
    """Requests without keys that a browser sends without a preflight request."""

    @pytest.mark.parametrize("path", ["/v1/drain", "/drain", "/v2/models/ensemble/infer", "/ping"])
    async def test_may_not_post(self, app, path):
        async with client_of(guarded(app, everyone_is_local, ServerConfig())) as client:
            for kind in ("text/plain;charset=UTF-8", "multipart/form-data", ""):
                response = await client.post(path, headers={**FORM, "content-type": kind})
                assert response.status_code == 403
                assert "cors_origins" in response.text

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "http://x"},
            {"origin": "null", "sec-fetch-site": "same-origin"},
            {"origin": "https://app.example.org"},
            {"origin": "https://evil.example", "content-type": "application/json"},
            {},
        ],
    )
    async def test_requests_that_are_allowed(self, app, headers):
        settings = ServerConfig(cors_origins=("https://app.example.org",))
        async with client_of(guarded(app, everyone_is_local, settings)) as client:
            assert (await client.post("/ping", headers=headers)).status_code == 200

    async def test_may_look(self, app):
        async with client_of(guarded(app, everyone_is_local, ServerConfig())) as client:
            assert (await client.get("/ping", headers=FORM)).status_code == 200


def describe(triton):
    with grpc_client(triton.grpc) as client:
        return client.get_model_metadata("ensemble").name


@pytest.fixture
def triton(backend, authenticate):
    with served_triton(backend, authenticate=authenticate) as server:
        yield server


class TestGrpc:
    def test_no_rpc_is_served_without_a_key(self, triton):
        service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        with grpc.insecure_channel(triton.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for method in service.methods:
                message = getattr(service_pb2, method.input_type.name)()
                call = getattr(stub, method.name)
                is_open = f"/inference.GRPCInferenceService/{method.name}" in OPEN_RPCS
                for metadata in ((), tuple(bearer("x").items())):
                    if is_open:
                        call(message, metadata=metadata)
                        continue
                    is_stream = method.name == "ModelStreamInfer"
                    with pytest.raises(grpc.RpcError) as raised:
                        list(call(iter([message]) if is_stream else message, metadata=metadata))
                    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name

    def test_triton_clients_send_it(self, triton, backend):
        for module, address in ((tritonclient.grpc, triton.grpc), (tritonclient.http, triton.http)):
            with module.InferenceServerClient(address) as client:
                assert client.is_server_live()
                assert client.is_server_ready()
                assert client.get_model_metadata("ensemble", headers=bearer(TENANT))
                with pytest.raises(InferenceServerException):
                    client.get_model_metadata("ensemble")
                with pytest.raises(InferenceServerException, match="right 'operator'"):
                    client.get_inference_statistics(headers=bearer(TENANT))
                with pytest.raises(InferenceServerException, match="right 'operator'"):
                    client.unload_model("ensemble", headers=bearer(TENANT))
                assert client.get_inference_statistics(headers=bearer(OPERATOR))

    def test_our_own_clients_take_it_from_the_environment(self, triton, monkeypatch, tmp_path):
        with pytest.raises(ConfigError, match=naming("LORAPLEX_API_KEY", "LORAPLEX_API_KEY_FILE")):
            describe(triton)
        monkeypatch.setenv("LORAPLEX_API_KEY", TENANT)
        assert describe(triton) == "ensemble"
        monkeypatch.delenv("LORAPLEX_API_KEY")
        monkeypatch.setenv("LORAPLEX_API_KEY_FILE", str(tmp_path / "key"))
        with pytest.raises(ConfigError, match=naming("LORAPLEX_API_KEY_FILE")):
            describe(triton)
        (tmp_path / "key").write_text(f"{TENANT}\n")
        assert describe(triton) == "ensemble"

    def test_a_stream_that_is_refused_says_why(self, triton):
        """Not that it "is no longer in valid state", which is what tritonclient raises."""
        options = program_options(TEXT_FLAGS, url=triton.grpc, prompt="hi")
        with pytest.raises(ConfigError, match=naming("LORAPLEX_API_KEY")):
            text_client.run(options, print)

    def test_a_rate_limit_reports_when_to_retry(self, triton, backend):
        backend.plant(RateLimitedError("too many", retry_after_seconds=2.2))
        request = service_pb2.ModelInferRequest(model_name="ensemble")
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        text.contents.bytes_contents.append(b"x")
        length = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
        length.contents.int_contents.append(1)
        with grpc.insecure_channel(triton.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                stub.ModelInfer(request, metadata=tuple(bearer(TENANT).items()))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(raised.value.trailing_metadata())["retry-after"] == "3"
