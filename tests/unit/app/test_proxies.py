"""A real nginx with the file of docs/proxies.md, in front of a whole server on a fake engine.

Without nginx these tests are left out. With REQUIRE_NGINX, which CI sets, that is a failure.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.documentation import ROOT, blocks
from support.fake_engine_process import SlowRunner
from support.server_in_loop import LONG, ServerInLoop

PAGE = ROOT / "docs" / "proxies.md"
NAME = "models.example.org"
CLIENT = "127.0.0.2"
"""Another address of this machine than that of the proxy."""
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
FRAME = """\
daemon off;
worker_processes 1;
{user}
pid {folder}/pid;
error_log {folder}/errors;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/responses;
    {sites}
}}
"""
"""What Debian's nginx.conf is around the file of the page, for a folder of the test."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificate of the page's server, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(folder / f"{NAME}.key"), "-out", str(folder / f"{NAME}.pem")]
    command += ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


class Nginx:
    """nginx as the page has it, on ports of its own."""

    def __init__(self, folder: Path, certificate: Path, server: ServerInLoop) -> None:
        self._certificate = certificate / f"{NAME}.pem"
        text = "\n".join(block.source for block in blocks(PAGE) if block.language == "nginx")
        text = text.replace("/etc/nginx/tls/", f"{certificate}/")
        listeners = {443: socket.socket(), 8443: socket.socket()}
        for documented, listener in listeners.items():
            listener.bind(("127.0.0.1", 0))
            listener.setblocking(False)
            # Clients may connect from now on: they wait until nginx accepts.
            listener.listen(64)
            port = listener.getsockname()[1]
            assert f"listen {documented} " in text
            text = text.replace(f"listen {documented} ", f"listen 127.0.0.1:{port} ")
        self.ports = {key: value.getsockname()[1] for key, value in listeners.items()}
        for documented, kind in {8000: "http", 8001: "grpc"}.items():
            assert f"127.0.0.1:{documented};" in text
            text = text.replace(f"127.0.0.1:{documented};", f"127.0.0.1:{server.port(kind)};")
        config = folder / "nginx.conf"
        # The worker writes into the folder, which is closed to others.
        user = "" if os.geteuid() else "user root;"
        config.write_text(FRAME.format(folder=folder, sites=text, user=user))
        assert NGINX is not None
        inherited = [listener.fileno() for listener in listeners.values()]
        self.process = subprocess.Popen(
            [NGINX, "-e", folder / "errors", "-c", config],
            pass_fds=inherited,
            env={**os.environ, "NGINX": "".join(f"{number};" for number in inherited)},
        )
        for listener in listeners.values():
            listener.close()

    def client(self) -> httpx.AsyncClient:
        """A client at CLIENT that knows the proxy by its name."""
        trust = ssl.create_default_context(cafile=self._certificate)
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.ports[443]}",
            headers={"Host": NAME},
            transport=_NamedTransport(verify=trust, local_address=CLIENT),
            timeout=60,
        )

    def channel(self) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(self._certificate.read_bytes())
        options = [("grpc.ssl_target_name_override", NAME)]
        return grpc.aio.secure_channel(f"127.0.0.1:{self.ports[8443]}", credentials, options)


class _NamedTransport(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "sni_hostname": NAME}
        return await super().handle_async_request(request)


@pytest.fixture
async def server(run) -> ServerInLoop:
    started = run(trusted_proxies=("127.0.0.1",), allowed_hosts=(NAME,), uploads=True)
    await started.until_ready()
    return started


@pytest.fixture
async def nginx(server, certificate, tmp_path) -> AsyncIterator[Nginx]:
    if NGINX is None:
        message = "nginx is not installed: run .ci/install_nginx"
        pytest.fail(message) if os.environ.get("REQUIRE_NGINX") else pytest.skip(message)
    folder = tmp_path / "nginx"
    folder.mkdir()
    proxy = Nginx(folder, certificate, server)
    yield proxy
    proxy.process.terminate()
    await asyncio.to_thread(proxy.process.wait)


class Steps:
    """The engine's steps with rows, each of which waits until the test allows it."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._is_free = False

    def allow(self, number: int) -> None:
        self._allowed.release(number)

    def free(self) -> None:
        self._is_free = True
        self._allowed.release()

    def wait(self) -> None:
        if not self._is_free:
            self._allowed.acquire()


@pytest.fixture
def steps(monkeypatch) -> Iterator[Steps]:
    controlled = Steps()
    launch = SlowRunner.launch

    def launch_when_allowed(self, plan):
        if plan.rows:
            controlled.wait()
        return launch(self, plan)

    monkeypatch.setattr(SlowRunner, "launch", launch_when_allowed)
    yield controlled
    controlled.free()


async def test_health_passes(nginx):
    async with nginx.client() as client:
        assert (await client.get("/health/ready")).status_code == 200


TOKENS_OF_A_PART = 8
"""Steps of which one has a text: a token may be a byte of a character, which is sent when whole."""
TRITON = {"text_input": "x", "max_tokens": 50, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", LONG | {"stream": True}), ("/v2/models/ensemble/generate_stream", TRITON)],
)
async def test_a_part_arrives_before_the_rest_is_computed(nginx, steps, path, body):
    async with nginx.client() as client:
        steps.allow(TOKENS_OF_A_PART)
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            events = response.aiter_lines()
            for _ in range(3):
                async with asyncio.timeout(60):
                    while not (await anext(events)).startswith("data:"):
                        pass
                steps.allow(TOKENS_OF_A_PART)


async def test_a_client_that_leaves_ends_its_request(nginx, server, steps):
    async with nginx.client() as client:
        steps.allow(TOKENS_OF_A_PART)
        async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as begun:
            await anext(begun.aiter_lines())
        async with asyncio.timeout(60):
            while not (ended := await ended_requests(client)):
                await asyncio.sleep(0.01)
    [generation] = ended[0]["generations"]
    assert generation["completion_tokens"] < LONG["max_tokens"]


async def ended_requests(client: httpx.AsyncClient) -> list[dict]:
    listed: list[dict] = (await client.get("/v1/requests")).json()["requests"]
    return listed


async def test_the_client_s_address_is_seen_and_cannot_be_forged(nginx):
    async with nginx.client() as client:
        body = LONG | {"max_tokens": 1}
        forged = {"X-Forwarded-For": "192.0.2.1"}
        assert (await client.post("/v1/completions", json=body, headers=forged)).is_success
        [ended] = await ended_requests(client)
        assert ended["client"] == CLIENT


async def test_a_page_of_the_proxy_may_post_and_others_may_not(nginx):
    async with nginx.client() as client:
        for origin, is_refused in {f"https://{NAME}": False, "https://other.example": True}.items():
            # What a form of any page sends without a check of the browser.
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            response = await client.post("/v1/completions", content=b"{}", headers=headers)
            assert (response.status_code == 403) is is_refused


async def test_large_bodies_get_the_server_s_response(nginx):
    """nginx's own limit, one MiB, responds with a page of HTML."""
    async with nginx.client() as client:
        response = await client.post("/v1/completions", json=LONG | {"prompt": "x" * (2 << 20)})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


async def test_an_upload_passes_that_is_larger_than_other_bodies(nginx):
    content = bytes(65 << 20)
    async with nginx.client() as client:
        created = await client.post("/v1/uploads")
        upload = created.json()["id"]
        path = f"/v1/uploads/{upload}/adapter_model.safetensors"
        assert (await client.put(path, content=content)).is_success
        [file] = (await client.get(f"/v1/uploads/{upload}")).json()["files"]
        assert file["num_bytes"] == len(content)


async def test_rpcs_pass(nginx):
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(nginx.channel())
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
