"""Two tenants and an operator at one real server: what each may, has, and learns of the others."""

import datetime
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loraplex.demo import ADAPTER_PATHS
from loraplex.serving.access.key_file_changes import create_key, revoke_key
from loraplex.testing.running_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tenants")]

NOW = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
SOURCE = str(ADAPTER_PATHS["chinese"])
PROMPT = "A prompt that is long enough for whole blocks of the cache: " * 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "tenant_keys.py"
LORAPLEX = (sys.executable, "-m", "loraplex")
TABLES = """
[tenants.acme]
list = ["chinese", "own-*"]
use = ["chinese", "own-*"]
manage = ["own-*"]
[tenants.umbrella]
manage = "all"
[tenants.slow]
requests_per_minute = 2
[tenants.ops]
operator = true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def keys(folder):
    """Return the keys by tenant, of a file next to the certificate."""
    path = folder / "keys.toml"
    path.write_text(TABLES)
    return {name: create_key(path, name, NOW)[1] for name in ("acme", "umbrella", "slow", "ops")}


@pytest.fixture(scope="module")
def server(folder, keys):
    flags = ["--api-keys-file", str(folder / "keys.toml"), "--fair-share", "tenant"]
    flags += ["--allowed-adapter-roots", str(ADAPTER_PATHS["japanese"].parent)]
    with serving(folder / "state", *flags) as running:
        yield running


@pytest.fixture
def of(server, keys):
    """A function (tenant) -> HTTP client."""
    clients = []

    def client(tenant):
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        clients.append(httpx.Client(base_url=server.url, headers=headers, timeout=60))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def complete(client, model="capitals", prompt=PROMPT, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


def cached(response):
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def names(client):
    return {entry["name"] for entry in client.get("/v1/adapters").json()["data"]}


def test_without_a_key(server):
    assert server.post("/v1/completions", {"prompt": "x"})[0] == 401
    assert server.get("/metrics", server.metrics_port)[0] == 401
    assert server.get("/v1/memory")[0] == 401
    assert server.get("/health/ready")[0] == 200
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException) as raised:
            client.get_model_metadata("ensemble")
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"


def test_operators_see_what_others_do_not(of, server, keys):
    for path in ("/v1/memory", "/v1/iterations", "/v1/internal/stats"):
        assert of("acme").get(path).status_code == 403
        assert of("ops").get(path).status_code == 200
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    for tenant, status in (("acme", 403), ("ops", 200)):
        headers = {"authorization": f"Bearer {keys[tenant]}"}
        assert httpx.get(url, headers=headers, timeout=60).status_code == status


def test_the_servers_adapters_are_there_by_right(of):
    acme, umbrella = of("acme"), of("umbrella")
    assert names(acme) == {"chinese"}
    assert names(umbrella) == {"chinese", "japanese"}
    assert complete(acme, "chinese").status_code == 200
    forbidden, unknown = complete(acme, "japanese"), complete(acme, "nothing")
    assert forbidden.status_code == unknown.status_code == 404
    assert forbidden.text.replace("japanese", "nothing") == unknown.text
    shown = umbrella.get("/v1/adapters/chinese").json()
    assert shown["source"] == ""
    assert shown["num_running"] is None
    assert umbrella.delete("/v1/adapters/chinese").status_code == 403
    assert complete(umbrella, "chinese").status_code == 200


def test_adapters_of_one_are_not_there_for_the_other(of, server, keys):
    acme, umbrella = of("acme"), of("umbrella")
    body = {"name": "own-zh", "path": SOURCE, "task_id": 77}
    assert umbrella.get("/v1/adapters/own-zh").status_code == 404
    unknown = complete(umbrella, "own-zh")
    unknown_task = by_task_id(server, keys["umbrella"], 77)
    refused = acme.post("/v1/adapters", json={**body, "name": "zh"})
    assert refused.status_code == 403
    assert "may not manage adapter 'zh'" in refused.text
    assert acme.post("/v1/adapters", json=body).status_code == 201
    assert names(acme) == {"chinese", "own-zh"}
    assert complete(acme, "own-zh").json()["choices"] == complete(acme, "chinese").json()["choices"]
    assert by_task_id(server, keys["acme"], 77) == ""

    assert names(umbrella) == {"chinese", "japanese"}
    assert complete(umbrella, "own-zh").text == unknown.text
    assert by_task_id(server, keys["umbrella"], 77) == unknown_task != ""
    assert umbrella.get("/v1/adapters/own-zh").status_code == 404
    assert umbrella.delete("/v1/adapters/own-zh").status_code == 404
    listed = {entry["id"] for entry in umbrella.get("/v1/models").json()["data"]}
    assert listed == {"capitals", "chinese", "japanese"}
    # The name is free for another tenant, and means its own there.
    mine = {**body, "path": str(ADAPTER_PATHS["japanese"])}
    assert umbrella.post("/v1/adapters", json=mine).status_code == 201
    assert by_task_id(server, keys["umbrella"], 77) == ""
    assert complete(umbrella, "own-zh").text != complete(acme, "own-zh").text
    for client in (acme, umbrella):
        assert client.delete("/v1/adapters/own-zh").status_code == 200


def by_task_id(server, key, task_id):
    """The error of a request over gRPC that names an adapter by its task id; empty: none."""
    tensors = []
    for name, kind, value in (
        ("text_input", "BYTES", np.array([["x"]], dtype=object)),
        ("max_tokens", "INT32", np.array([[2]], dtype=np.int32)),
        ("lora_task_id", "UINT64", np.array([[task_id]], dtype=np.uint64)),
    ):
        tensors.append(triton_grpc.InferInput(name, list(value.shape), kind))
        tensors[-1].set_data_from_numpy(value)
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        try:
            client.infer("ensemble", tensors, headers={"authorization": f"Bearer {key}"})
        except InferenceServerException as error:
            return str(error)
    return ""


def test_a_prompt_of_one_is_no_hit_for_the_other(of):
    acme, umbrella = of("acme"), of("umbrella")
    for model in ("capitals", "chinese"):
        prompt = f"{model}: {PROMPT}"
        assert cached(complete(acme, model, prompt)) == 0
        assert cached(complete(acme, model, prompt)) > 0
        assert cached(complete(umbrella, model, prompt)) == 0
        assert cached(complete(umbrella, model, prompt)) > 0


def test_a_rate(of):
    slow = of("slow")
    responses = [complete(slow, prompt="x") for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert 1 <= int(responses[-1].headers["retry-after"]) <= 61
    error = responses[-1].json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert "'slow' may send 2 requests a minute" in error["message"]
    assert complete(of("acme"), prompt="x").status_code == 200


def test_a_new_key_and_a_revoked_one(of, server, folder):
    path = folder / "keys.toml"
    key_id, key, _ = create_key(path, "acme", NOW)
    headers = {"authorization": f"Bearer {key}"}

    def status():
        return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code

    def becomes(wanted):
        deadline = time.monotonic() + 60
        while status() != wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return status() == wanted

    assert becomes(200)
    revoke_key(path, key_id)
    assert becomes(401)
    assert of("acme").get("/v1/models").status_code == 200


def test_tls_on_every_port(tmp_path, keys, folder):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    flags = ["--api-keys-file", str(folder / "keys.toml")]
    flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    with serving(tmp_path / "state", *flags, certificate=certificate) as server:
        headers = {"authorization": f"Bearer {keys['ops']}"}
        for port, path in ((server.http_port, "/v1/models"), (server.metrics_port, "/metrics")):
            url = f"https://127.0.0.1:{port}{path}"
            trusting = ssl.create_default_context(cafile=certificate)
            assert httpx.get(url, headers=headers, verify=trusting, timeout=60).status_code == 200
            with pytest.raises(httpx.ConnectError):
                httpx.get(url, headers=headers, timeout=60)
            with pytest.raises(httpx.HTTPError):
                httpx.get(url.replace("https", "http"), headers=headers, timeout=60)
        address = f"localhost:{server.grpc_port}"
        trust = {"ssl": True, "root_certificates": str(certificate)}
        with triton_grpc.InferenceServerClient(address, **trust) as client:
            assert client.get_model_metadata("ensemble", headers=headers)
        listed = subprocess.run(
            [*LORAPLEX, "adapters", "list", "--url", f"https://127.0.0.1:{server.http_port}"],
            env={
                **os.environ,
                "SSL_CERT_FILE": str(certificate),
                "LORAPLEX_API_KEY": keys["umbrella"],
            },
            check=True,
            capture_output=True,
            text=True,
        )
        assert "japanese" in listed.stdout


def test_the_example_of_two_tenants(server, keys, tmp_path):
    """examples/tenant_keys.py, whose tenants have the rights of these."""
    command = [sys.executable, str(EXAMPLE), "--url", server.url]
    for tenant, adapter in (("acme", "chinese"), ("umbrella", "japanese")):
        (tmp_path / tenant).write_text(keys[tenant])
        command += [f"--{tenant}-key-file", str(tmp_path / tenant)]
        command += [f"--{tenant}-adapter", str(ADAPTER_PATHS[adapter])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.splitlines() == [
        "acme: 华盛顿",
        "acme sees: chinese, own-style",
        "umbrella: ワシントン D.C.",
        "umbrella sees: chinese, japanese, own-style",
    ]
    assert (run.stderr, run.returncode) == ("", 0)
