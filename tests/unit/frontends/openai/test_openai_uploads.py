"""/v1/uploads over the whole app of the HTTP port."""

import re

import httpx
import pytest

from loraplex.adapters.uploads import UploadLimits, Uploads
from loraplex.core.principal import NONE, Principal, Rights
from loraplex.core.server_config import ServerConfig
from loraplex.testing.fake_clock import FakeClock
from support.described_app import TEST_HOST, described_app
from support.echo_service import EchoService
from support.naming import naming

MIB = 1 << 20
LIMITS = UploadLimits(max_bytes=8 * MIB, max_tenant_bytes=9 * MIB, max_uploads=2, max_seconds=60)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def by_tenant(headers) -> Principal:
    tenant = headers.get("authorization", "Bearer a").removeprefix("Bearer ")
    return Principal(tenant, Rights(manage=NONE) if tenant == "reader" else Rights())


@pytest.fixture
def backend(tmp_path):
    backend = EchoService()
    backend.uploads = Uploads(tmp_path / "uploads", LIMITS, FakeClock())
    yield backend
    backend.uploads.close()


@pytest.fixture
async def client(backend):
    # One MiB of bodies in memory, of which a tenant has half.
    settings = ServerConfig(
        allowed_hosts=(TEST_HOST,), max_body_bytes=MIB // 2, max_bodies_bytes=MIB
    )
    app = described_app(backend, by_tenant, settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{TEST_HOST}") as client:
        yield client


async def begin(client, **options) -> str:
    response = await client.post("/v1/uploads", **options)
    assert response.status_code == 201, response.text
    return response.json()["id"]


async def mebibytes(number: int):
    for _ in range(number * 16):
        yield b"x" * (MIB // 16)


def of(tenant: str) -> dict[str, dict[str, str]]:
    return {"headers": {"authorization": f"Bearer {tenant}"}}


async def test_an_upload_from_its_beginning_to_its_end(client):
    created = (await client.post("/v1/uploads")).json()
    assert created["object"] == "upload"
    assert created["path"] == f"upload://{created['id']}"
    assert (created["max_bytes"], created["files"]) == (8 * MIB, [])
    url = f"/v1/uploads/{created['id']}"
    put = await client.put(f"{url}/{CONFIG}", content=b"{}")
    assert put.status_code == 200, put.text
    assert put.json()["files"] == [{"name": CONFIG, "num_bytes": 2}]
    assert (await client.get(url)).json()["num_bytes"] == 2
    assert (await client.delete(url)).json() == {
        "id": created["id"],
        "object": "upload",
        "deleted": True,
    }
    gone = await client.get(url)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "upload_not_found")


async def test_a_file_may_be_larger_than_the_memory_of_bodies(client, backend):
    upload_id = await begin(client)

    sent = await client.put(f"/v1/uploads/{upload_id}/{WEIGHTS}", content=mebibytes(6))
    assert sent.status_code == 200, sent.text
    assert sent.json()["num_bytes"] == 6 * MIB


async def test_what_is_too_large_is_refused_before_it_is_read(client, tmp_path):
    upload_id = await begin(client)
    reads = []

    async def chunks():
        for _ in range(9 * 16):
            reads.append(1)
            yield b"x" * (MIB // 16)

    url = f"/v1/uploads/{upload_id}/{WEIGHTS}"
    headers = {"content-length": str(9 * MIB), "expect": "100-continue"}
    response = await client.put(url, content=chunks(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert "max_adapter_bytes" in response.json()["error"]["message"]
    assert reads == []
    response = await client.put(url, content=chunks())
    assert (response.status_code, len(reads)) == (413, 9 * 16)
    assert list(tmp_path.rglob("*.part")) == []


async def test_the_quota_of_a_tenant(client):
    first, second = await begin(client), await begin(client)
    too_many = await client.post("/v1/uploads")
    assert (too_many.status_code, too_many.headers["retry-after"]) == (429, "60")
    assert (await client.put(f"/v1/uploads/{first}/{WEIGHTS}", content=mebibytes(8))).is_success
    over = await client.put(f"/v1/uploads/{second}/{WEIGHTS}", content=mebibytes(2))
    assert (over.status_code, "upload_bytes" in over.text) == (413, True)


async def test_other_tenants_and_those_without_the_right(client):
    upload_id = await begin(client)
    url = f"/v1/uploads/{upload_id}"
    for tenant, status in (("b", 404), ("reader", 403)):
        assert (await client.get(url, **of(tenant))).status_code == status
        assert (await client.delete(url, **of(tenant))).status_code == status
        assert (
            await client.put(f"{url}/{CONFIG}", content=b"", **of(tenant))
        ).status_code == status
    assert (await client.post("/v1/uploads", **of("reader"))).status_code == 403
    assert (await client.get(url)).status_code == 200


@pytest.mark.parametrize("name", ["README.md", "..%2f..%2fx", "%2e%2e", "adapter_config.json%00"])
async def test_names_that_are_no_files_of_an_adapter(client, name):
    upload_id = await begin(client)
    response = await client.put(f"/v1/uploads/{upload_id}/{name}", content=b"")
    assert response.status_code in (400, 404, 405), response.text


async def test_a_compressed_body_is_refused(client):
    upload_id = await begin(client)
    headers = {"content-encoding": "gzip"}
    response = await client.put(f"/v1/uploads/{upload_id}/{CONFIG}", content=b"", headers=headers)
    assert response.status_code == 400


async def test_where_uploads_are_off(client, backend):
    uploads, backend.uploads = backend.uploads, None
    response = await client.post("/v1/uploads")
    backend.uploads = uploads
    assert response.status_code == 400
    assert re.search(naming("uploads"), response.json()["error"]["message"])


async def test_pages_of_other_origins_send_nothing(client):
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    response = await client.post("/v1/uploads", headers=headers)
    assert response.status_code == 403


async def test_me_has_the_limits_of_uploads(client, backend):
    uploads = (await client.get("/v1/me")).json()["uploads"]
    assert uploads["max_bytes"] == 8 * MIB
    assert {CONFIG, WEIGHTS, "adapter.safetensors"} <= set(uploads["files"])
    kept, backend.uploads = backend.uploads, None
    assert (await client.get("/v1/me")).json()["uploads"] is None
    backend.uploads = kept
