"""`loraplex serve` as Kubernetes runs it: KServe's command line, a mounted certificate that is
renewed, adapters of controllers, and the metrics of gateways."""

import json
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import RunningServer, running
from support.capitals.corpus import COUNTRIES, founding_prompts

FIRST, SECOND = list(ADAPTER_PATHS)[:2]
NAMESPACE = "publishers/team/models"
FRANCE = next(country for country in COUNTRIES if country.english == "France")
RENEWAL_SECONDS = 60


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    made, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(made), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def text(server: RunningServer, model: str) -> str:
    prompt = founding_prompts(FRANCE)["english"]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return response["choices"][0]["text"]


def loaded(server: RunningServer) -> dict[str, str]:
    """Levels of the adapters that a gateway sees."""
    families = text_string_to_metric_families(server.get("/metrics")[1])
    return {
        sample.labels["adapter_name"]: sample.labels["level"]
        for family in families
        for sample in family.samples
        if sample.name == "vllm:lora_adapter_loaded"
    }


@pytest.mark.slow
def test_a_pod_of_kserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if a service of the namespace were called loraplex.
    monkeypatch.setenv("LORAPLEX_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("LORAPLEX_PORT", "tcp://10.0.0.1:8000")
    mounted = tmp_path / "tls.crt", tmp_path / "tls.key"
    first, second = (certificate(tmp_path, name) for name in ("first", "second"))
    for source, target in zip(first, mounted, strict=True):
        shutil.copy(source, target)
    modules = [
        f"'{json.dumps({'name': name, 'path': str(ADAPTER_PATHS[FIRST])})}'"
        for name in (FIRST, f"{NAMESPACE}/{FIRST}")
    ]
    command = [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH)]
    command += ["--enable-lora", "--max-loras=4", "--max-cpu-loras=8", "--lora-modules", *modules]
    command += ["--served-model-name", "base", f"{NAMESPACE}/base", "--port", "0"]
    command += ["--grpc-port=0", "--metrics-port=0", "--enable-ssl-refresh"]
    command += ["--ssl-certfile", str(mounted[0]), "--ssl-keyfile", str(mounted[1])]
    command += ["--state-dir", str(tmp_path / "state")]
    with running(command, certificate=first[0]) as server:
        assert [server.get(path)[0] for path in ("/health", "/health/live")] == [200, 200]
        models = [model["id"] for model in json.loads(server.get("/v1/models")[1])["data"]]
        assert models == ["base", f"{NAMESPACE}/base", FIRST, f"{NAMESPACE}/{FIRST}"]
        assert text(server, "base") == text(server, f"{NAMESPACE}/base")
        names = (FIRST, f"{NAMESPACE}/{FIRST}", f"base:{FIRST}", f"base_{FIRST}")
        (of_first,) = {text(server, name) for name in names}

        body = {"lora_name": SECOND, "source": {"uri": f"file://{ADAPTER_PATHS[SECOND]}"}}
        assert server.post("/v1/loras", body)[0] == 200
        assert text(server, SECOND) != of_first
        assert set(json.loads(server.get("/v1/loras")[1])["loras"]) == {*models[2:], SECOND}
        levels = loaded(server)
        assert levels[FIRST] == levels[SECOND] == "gpu"
        assert server.delete(f"/v1/loras/{SECOND}") == 200

        for source, target in zip(second, mounted, strict=True):
            shutil.copy(source, target)
        deadline = time.monotonic() + RENEWAL_SECONDS
        address = ("127.0.0.1", server.http_port)
        while ssl.get_server_certificate(address) != second[0].read_text():
            assert time.monotonic() < deadline, "the certificate was not renewed"
            time.sleep(0.2)
        server.certificate = second[0]
        assert text(server, FIRST) == of_first
