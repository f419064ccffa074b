"""Uploads to a server of two processes with TLS and tenants: from the client's files to outputs."""

import datetime
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.demo import ADAPTER_PATHS
from loraplex.serving.access.key_file_changes import create_key
from loraplex.testing.running_server import RunningServer, serving
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("uploads")]

MAX_BYTES = 8 << 20
FLAGS = (
    *("--frontend-processes", "2", "--uploads", "--max-body-bytes", "1048576"),
    *("--max-adapter-bytes", str(MAX_BYTES)),
)
FILES = ("adapter_config.json", "adapter_model.safetensors")
NOW = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
TABLES = '[tenants.acme]\nmanage = "all"\n[tenants.umbrella]\nmanage = "all"\n[tenants.reader]\n'


class Site:
    """Certificate, keys and state of servers that follow each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate, key = folder / "cert.pem", folder / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-keyout", str(key), "-out", str(self.certificate), "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True)
        path = folder / "keys.toml"
        path.write_text(TABLES)
        self.keys = {
            name: create_key(path, name, NOW)[1] for name in ("acme", "umbrella", "reader")
        }
        self.flags = ["--api-keys-file", str(path), "--tls-key", str(key)]
        self.flags += ["--tls-cert", str(self.certificate)]
        self.trust = ssl.create_default_context(cafile=self.certificate)

    def serving(self):
        flags = (*FLAGS, *self.flags)
        return serving(self.folder / "state", *flags, certificate=self.certificate)

    def client(self, server: RunningServer, tenant: str = "acme") -> httpx.Client:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=server.url, headers=headers, verify=self.trust, timeout=60)

    def files(self) -> list[str]:
        found = (self.folder / "state" / "uploads").rglob("*")
        return sorted(path.name for path in found if path.is_file() and path.name != ".owner")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return Site(tmp_path_factory.mktemp("uploads"))


@pytest.fixture(scope="module")
def server(site):
    with site.serving() as running:
        yield running


def upload(client: httpx.Client, folder: Path = ADAPTER_PATHS["chinese"]) -> str:
    """The path of an upload with the files of a folder."""
    path = client.post("/v1/uploads").json()["path"]
    for name in FILES:
        sent = client.put(f"{url_of(path)}/{name}", content=(folder / name).read_bytes())
        assert sent.status_code == 200, sent.text
    return path


def url_of(path: str) -> str:
    return f"/v1/uploads/{path.removeprefix('upload://')}"


def load(client: httpx.Client, path: str, **fields) -> httpx.Response:
    return client.post("/v1/adapters", json={"name": "zh", "path": path} | fields)


def complete(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "The capital of the US is", "max_tokens": 9, "temperature": 0}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_dry_run_keeps_an_upload_and_a_load_takes_it(site, server):
    with site.client(server) as client, site.client(server, "umbrella") as other:
        path = upload(client)
        for again in (False, True):
            tried = load(client, path, dry_run=True, canary=again)
            assert tried.status_code == 200, tried.text
        stolen = load(other, path)
        assert (stolen.status_code, stolen.json()["error"]["code"]) == (404, "upload_not_found")
        loaded = load(client, path)
        assert loaded.status_code == 201, loaded.text
        assert loaded.json()["source"] == path
        assert client.get(url_of(path)).status_code == 404
        assert site.files() == []
        assert complete(client, "zh") == complete(client, "chinese")
        # There is no source to read again.
        body = {"model": "zh", "prompt": "x", "max_tokens": 1, "load_lora_weights": "always"}
        assert client.post("/v1/completions", json=body).status_code == 200
        second = upload(client, ADAPTER_PATHS["japanese"])
        assert load(client, second).status_code == 409
        replaced = load(client, second, replace=True)
        assert (replaced.status_code, replaced.json()["version"]) == (201, 2)
        assert complete(client, "zh") == complete(client, "japanese")


def test_errors_name_the_file_and_no_path_of_the_server(site, server, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(ADAPTER_PATHS["chinese"], broken)
    (broken / FILES[1]).write_bytes(b"no tensors")
    with site.client(server) as client:
        path = upload(client, broken)
        for dry_run in (True, False):
            refused = load(client, path, name="bad", dry_run=dry_run)
            assert refused.status_code == 422, refused.text
            message = refused.json()["error"]["message"]
            assert FILES[1] in message
            assert str(site.folder) not in message
            assert "upload://" not in message
        assert client.get(url_of(path)).status_code == 200, "what was not loaded stays"
        empty = client.post("/v1/uploads").json()["path"]
        assert load(client, empty, name="bad").status_code == 422
        for wrong in (path, empty):
            assert client.delete(url_of(wrong)).status_code == 200
        for text in ("upload://", "upload://../x", f"upload://{'0' * 32}"):
            refused = load(client, text, name="bad")
            assert refused.json()["error"]["code"] == "upload_not_found", refused.text


def damaged(folder: Path, change) -> Path:
    """A copy of the adapter whose tensors `change` has changed."""
    shutil.copytree(ADAPTER_PATHS["chinese"], folder)
    tensors = load_file(folder / FILES[1])
    change(tensors)
    save_file(tensors, folder / FILES[1])
    return folder


def test_a_dry_run_in_detail(site, server, tmp_path):
    def cut(tensors):
        name = next(name for name in tensors if "lora_B" in name)
        tensors[name] = tensors[name][:3].copy()
        tensors["stranger"] = tensors[name]

    def silence(tensors):
        for name in tensors:
            if "lora_B" in name:
                tensors[name] = np.zeros_like(tensors[name])

    with site.client(server) as client:

        def trial(folder: Path, **fields):
            path = upload(client, folder)
            response = load(
                client, path, name="t", dry_run=True, canary=True, details=True, **fields
            )
            assert response.status_code == 200, response.text
            assert client.delete(url_of(path)).status_code == 200
            return response.json()

        good = trial(ADAPTER_PATHS["chinese"])
        assert (good["ok"], good["error"], good["format"]) == (True, None, "PEFT")
        assert (good["changes_base"], good["fits_now"]) == (True, True)
        assert good["adapter"]["dry_run"] is True
        assert good["num_tensors"] == good["adapter"]["content"]["num_tensors"]
        assert {tensor["applied"] for tensor in good["tensors"]} == {True}
        assert (good["evicts"], good["replaces"]) == ([], None)

        bad = trial(damaged(tmp_path / "cut", cut))
        assert (bad["ok"], bad["adapter"], bad["fits_now"]) == (False, None, None)
        assert bad["num_refused"] == 3
        assert {t["name"] for t in bad["tensors"] if t["refused"]} >= {"stranger"}
        assert all(t["reason"] for t in bad["tensors"][:3])
        assert bad["error"]["code"] == "invalid_adapter"

        silent = trial(damaged(tmp_path / "silent", silence))
        assert (silent["ok"], silent["changes_base"]) == (False, False)
        assert (silent["num_refused"], silent["num_tensors"]) == (0, good["num_tensors"])

        taken = load(client, "upload://x", name="t", details=True)
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "details")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_is_too_large_gets_a_response(site, server, is_chunked):
    data = bytes(MAX_BYTES + 1)

    def pieces():
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    for _ in range(4):  # over either process
        with site.client(server) as client:
            path = client.post("/v1/uploads").json()["path"]
            content = pieces() if is_chunked else data
            response = client.put(f"{url_of(path)}/{FILES[1]}", content=content)
            assert response.status_code == 413, response.text
            assert "max_adapter_bytes" in response.json()["error"]["message"]
            assert client.get(url_of(path)).json()["files"] == []
            assert client.delete(url_of(path)).status_code == 200


def test_without_the_right(site, server):
    with site.client(server, "reader") as client:
        assert client.post("/v1/uploads").status_code == 403


def test_a_client_that_leaves_half_way(site, server):
    with site.client(server) as client:
        path = client.post("/v1/uploads").json()["path"]
        with socket.create_connection(("127.0.0.1", server.http_port)) as plain:
            tls = site.trust.wrap_socket(plain, server_hostname="localhost")
            head = f"PUT {url_of(path)}/{FILES[1]} HTTP/1.1\r\nhost: localhost\r\n"
            head += (
                f"authorization: Bearer {site.keys['acme']}\r\ncontent-length: {MAX_BYTES}\r\n\r\n"
            )
            tls.sendall(head.encode() + b"x" * 3_000_000)
            assert eventually(lambda: any(name.endswith(".part") for name in site.files()))
            tls.close()
        assert eventually(lambda: site.files() == [])
        assert client.get(url_of(path)).json()["files"] == []
        client.delete(url_of(path))


def test_a_restart_keeps_what_was_loaded_and_no_upload(tmp_path):
    site = Site(tmp_path)
    with site.serving() as server, site.client(server) as client:
        assert load(client, upload(client)).status_code == 201
        path = upload(client)
        assert site.files() == list(FILES)
        server.process.kill()
        server.process.wait()
    assert site.files() == list(FILES)
    with site.serving() as server, site.client(server) as client:
        assert site.files() == []
        assert client.get(url_of(path)).status_code == 404
        assert complete(client, "zh") == complete(client, "chinese")
