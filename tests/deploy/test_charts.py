"""The Helm chart and the examples of other controllers, rendered and checked without a cluster."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import typer.testing
import yaml
from prometheus_client.core import Metric
from starlette.routing import Route

from loraplex.app.access import OPEN_PATHS
from loraplex.cli import serve as serve_module
from loraplex.cli.main import app
from loraplex.cli.serve import build_config
from loraplex.core.config import Config
from loraplex.core.errors import ConfigError
from loraplex.frontends.openai import openai_routes
from loraplex.frontends.ops.gateway_metrics import GatewayCollector
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import metrics_registry, metrics_routes
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "loraplex"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
EXAMPLES = sorted(
    path for path in DEPLOY.glob("*/*.yaml") if path.parent.name not in ("compose", "monitoring")
)
KUBERNETES = ("1.30", "1.37")
CRDS = {
    (crd["apiVersion"], crd["kind"]): crd["schema"]
    for crd in (json.loads(path.read_text()) for path in Path(__file__).parent.glob("crds/*.json"))
}

Document = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(str(CHART)) as chart:
        yield chart


def rendered(chart: helm_python.Chart, values: dict[str, Any]) -> list[Document]:
    chart.validate_schema(values)
    files = chart.render(values, name="release", namespace="serving", is_install=True)
    documents = (document for text in files.values() for document in yaml.safe_load_all(text))
    return [document for document in documents if document]


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


@pytest.fixture
def documents(chart: helm_python.Chart, values: dict[str, Any]) -> list[Document]:
    return rendered(chart, values)


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def workload(documents: list[Document]) -> Document:
    (found,) = of_kind(documents, "Deployment", "StatefulSet")
    return found


def container(documents: list[Document]) -> Document:
    (found,) = workload(documents)["spec"]["template"]["spec"]["containers"]
    return found


def check(document: Document) -> None:
    """Raise for a wrong type or an unknown key, by Kubernetes' schemas or the custom resource's."""
    schema = CRDS.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        jsonschema.validate(document, schema)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def check_pod(template: Document) -> None:
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template})


INVALID = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


# ---------------------------------------------------------------- schemas


def test_lint(values: dict[str, Any]) -> None:
    report = helm_python.lint(str(CHART), values, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


def test_every_object_is_valid(documents: list[Document]) -> None:
    for document in documents:
        check(document)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_example_is_valid(path: Path) -> None:
    document = read(path)
    check(document)
    template = document["spec"].get("template")
    if document["kind"] == "LLMInferenceServiceConfig":
        check_pod(template)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "replicas"), "two"),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "readinesProbe"), {}),
        ("Service", ("spec", "ports", 0, "port"), "http"),
        ("InferencePool", ("spec", "targetPorts"), [{"number": "8000"}]),
        ("InferencePool", ("spec", "endpointPickerReference"), {"name": "x"}),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervall"), "5s"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_a_planted_error_is_found(
    chart: helm_python.Chart, kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    documents = rendered(chart, read(CHART / "ci" / "gateway-values.yaml"))
    (document,) = copy.deepcopy(of_kind(documents, kind))
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(INVALID):
        check(document)


MINIMAL = read(CHART / "ci" / "minimal-values.yaml")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"replica": 2}, "replica"),
        ({"model": {"path": "/m", "pth": "/m"}}, "pth"),
        ({"replicas": "two"}, "replicas"),
        ({"kind": "DaemonSet"}, "kind"),
        ({"settings": {"Max-Num-Seqs": 1}}, "Max-Num-Seqs"),
        ({"settings": {"max_num_seqs": {"of": 1}}}, "max_num_seqs"),
        ({"monitor": {"interval": "often"}}, "interval"),
        ({"state": {"size": "much"}}, "size"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(
    chart: helm_python.Chart, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        chart.validate_schema(MINIMAL | more)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"image": {"repository": ""}}, "image.repository"),
        ({"model": {"path": ""}}, "model.path"),
        ({"apiKeys": {"allowNone": False}}, "apiKeys: give existingSecret or content"),
        ({"apiKeys": {"existingSecret": "x", "content": "y"}}, "not both"),
        ({"replicas": 2, "state": {"persistence": True}}, "use kind StatefulSet"),
        (
            {"adapters": {"declarations": {"existingClaim": "x", "place": "s3://x/y"}}},
            "adapters.declarations.place: give the folder",
        ),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused(
    chart: helm_python.Chart, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        chart.render(MINIMAL | more, name="release", namespace="serving", is_install=True)
    assert text in str(caught.value)


def test_every_object_of_values_is_closed() -> None:
    """An object of the schema has its own properties, or is an object of Kubernetes."""

    def open_objects(schema: Any, path: str) -> Iterator[str]:
        if not isinstance(schema, dict):
            return
        if "properties" in schema and schema.get("additionalProperties") is not False:
            yield path
        for key, value in schema.get("properties", {}).items():
            yield from open_objects(value, f"{path}.{key}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert list(open_objects(schema, "")) == []
    defaults = read(CHART / "values.yaml")
    assert set(schema["properties"]) - {"global"} == set(defaults)


# ---------------------------------------------------------------- what the server has


def config_of(monkeypatch: pytest.MonkeyPatch, main: Document, added: Sequence[str] = ()) -> Config:
    """Parse a container's command line and variables with the server's own parser.

    added: arguments that a controller puts before the container's.
    """
    found: list[Config] = []
    for entry in main["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    command = [*main["command"], *added, *main["args"]]

    def keep(*given: Any) -> Config:
        found.append(build_config(*given))
        raise ConfigError("no server in this test")

    monkeypatch.setattr(serve_module, "build_config", keep)
    assert command[0] == "loraplex"
    result = typer.testing.CliRunner().invoke(app, command[1:])
    assert found, result.output
    return found[0]


def test_the_server_takes_the_command(
    monkeypatch: pytest.MonkeyPatch, documents: list[Document], values: dict[str, Any]
) -> None:
    main = container(documents)
    config = config_of(monkeypatch, main)
    (model,) = config.models.values()
    assert model.path == values["model"]["path"]
    names = values["model"].get("names") or [Path(model.path).name]
    assert [*config.models, *model.served_names] == names
    server = config.server
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    assert ports == {
        "http": server.http_port,
        "grpc": server.grpc_port,
        "metrics": server.metrics_port,
    }
    for name, value in values.get("settings", {}).items():
        place = server if hasattr(server, name) else model
        found = getattr(place, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    declarations = values.get("adapters", {}).get("declarations", {})
    assert server.adapter_declarations == declarations.get("place", "")
    parallel = values.get("parallel", {})
    assert model.tensor_parallel_size == parallel.get("tensorParallelSize", 1)


def test_kserves_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """KServe fills the names in, and puts its flags for adapters before the arguments."""
    (main,) = read(DEPLOY / "kserve" / "config.yaml")["spec"]["template"]["containers"]
    assert main["name"] == "main"
    added = ["--enable-lora", "--max-lora-rank=16", "--max-loras=2", "--max-cpu-loras=4"]
    added += ["--lora-modules", """'{"name":"a","path":"/mnt/lora/a"}'"""]
    added += ["""'{"name":"publishers/ns/models/a","path":"/mnt/lora/a"}'"""]
    main["args"] = [
        argument.replace("{{ .Spec.Model.Name }}", "llama").replace(
            "{{ .ObjectMeta.Namespace }}", "ns"
        )
        for argument in main["args"]
    ]
    config = config_of(monkeypatch, main, added)
    model = config.models["llama"]
    assert model.path == "/mnt/models"
    assert model.served_names == ("publishers/ns/models/llama",)
    assert sorted(model.adapters) == ["a", "publishers/ns/models/a"]
    assert config.server.http_port == main["ports"][0]["containerPort"] == 8000
    assert config.server.tls_cert == "/var/run/kserve/tls/tls.crt"


def probes(main: Document) -> dict[str, Document]:
    return {name: main[name]["httpGet"] for name in main if name.endswith("Probe")}


def test_probes_are_routes_that_need_no_key(documents: list[Document]) -> None:
    backend = EchoService()
    routes = [*openai_routes(backend), *health_routes(backend, AsyncMock(return_value={}))]
    paths = {route.path for route in routes if isinstance(route, Route)}
    (kserve,) = read(DEPLOY / "kserve" / "config.yaml")["spec"]["template"]["containers"]
    for main in (container(documents), kserve):
        found = probes(main)
        assert set(found) == {"startupProbe", "readinessProbe", "livenessProbe"}
        for probe in found.values():
            assert probe["path"] in paths
            assert probe["path"] in OPEN_PATHS
        # The server restarts an engine itself: that must not end the pod.
        assert found["livenessProbe"]["path"] == "/health/live"
        is_tls = any("cert" in argument for argument in main["args"])
        assert {probe["scheme"] for probe in found.values()} == {"HTTPS" if is_tls else "HTTP"}


def metric_names() -> set[str]:
    backend = EchoService()
    gateway = GatewayCollector(backend)
    registry = metrics_registry(backend, RequestMetrics(), [gateway])
    families: list[Metric] = list(registry.collect())
    return {family.name for family in families}


def test_metrics_exist(chart: helm_python.Chart) -> None:
    documents = rendered(chart, read(CHART / "ci" / "gateway-values.yaml"))
    (autoscaler,) = of_kind(documents, "HorizontalPodAutoscaler")
    names = [metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]]
    assert names
    assert set(names) <= metric_names()


def test_monitors_scrape_a_route(documents: list[Document]) -> None:
    (route,) = metrics_routes(EchoService(), RequestMetrics())
    ports = {port["name"] for port in container(documents)["ports"]}
    for monitor in of_kind(documents, "PodMonitor", "ServiceMonitor"):
        spec = monitor["spec"]
        (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        assert endpoint["path"] == route.path
        assert endpoint["port"] in ports


# ---------------------------------------------------------------- objects fit together


def test_selectors_find_the_pods(documents: list[Document]) -> None:
    labels = workload(documents)["spec"]["template"]["metadata"]["labels"]
    services = of_kind(documents, "Service")
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if document["kind"] == "ServiceMonitor":
            assert selector["matchLabels"].items() <= services[0]["metadata"]["labels"].items()
        elif selector:
            assert selector.get("matchLabels", selector).items() <= labels.items()


def test_references_exist_or_are_given(documents: list[Document], values: dict[str, Any]) -> None:
    made = {(document["kind"], document["metadata"]["name"]) for document in documents}
    text = json.dumps(values)
    spec = workload(documents)["spec"]
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    pod = spec["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [mount["name"] for mount in container(documents)["volumeMounts"]]
    assert sorted(mounts) == sorted({*volumes, *claims})
    for volume in volumes.values():
        for kind, field, key in (
            ("Secret", "secret", "secretName"),
            ("ConfigMap", "configMap", "name"),
            ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
        ):
            if field in volume:
                name = volume[field][key]
                assert (kind, name) in made or f'"{name}"' in text


def test_a_pod_ends_after_its_requests(
    monkeypatch: pytest.MonkeyPatch, documents: list[Document]
) -> None:
    (kserve,) = [read(DEPLOY / "kserve" / "config.yaml")["spec"]["template"]]
    for pod in (workload(documents)["spec"]["template"]["spec"], kserve):
        (main,) = pod["containers"]
        before = main["lifecycle"]["preStop"]["sleep"]["seconds"]
        server = config_of(monkeypatch, main).server
        assert pod["terminationGracePeriodSeconds"] >= before + server.shutdown_seconds + 10
        assert pod["enableServiceLinks"] is False


def test_devices_of_all_ranks(documents: list[Document], values: dict[str, Any]) -> None:
    parallel = values.get("parallel", {})
    ranks = parallel.get("tensorParallelSize", 1) * parallel.get("pipelineParallelSize", 1)
    limits = container(documents).get("resources", {}).get("limits", {})
    if "accelerator" in values:
        assert limits[values["accelerator"]["resourceName"]] == str(ranks)
    else:
        assert not any("/" in name for name in limits)


def test_adapters_are_read_by_the_server(chart: helm_python.Chart) -> None:
    documents = rendered(chart, read(CHART / "ci" / "gateway-values.yaml"))
    (config,) = of_kind(documents, "ConfigMap")
    ((name, text),) = config["data"].items()
    assert json.loads(text) == {"fr": "hf://example/llama-fr", "legal": "s3://adapters/legal"}
    assert f"--multi-lora=/etc/loraplex/adapters/{name}" in container(documents)["args"]


def test_labels_of_aibrix(chart: helm_python.Chart) -> None:
    documents = rendered(chart, read(CHART / "ci" / "aibrix-values.yaml"))
    labels = workload(documents)["spec"]["template"]["metadata"]["labels"]
    assert labels["model.aibrix.ai/name"] == "llama"
    assert labels["model.aibrix.ai/engine"] == "vllm"
    assert labels["model.aibrix.ai/port"] == "8000"
    assert labels["model.aibrix.ai/metric-port"] == "8002"
    adapter = read(DEPLOY / "aibrix" / "modeladapter.yaml")
    assert adapter["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_pool_of_the_gateway(chart: helm_python.Chart) -> None:
    documents = rendered(chart, read(CHART / "ci" / "gateway-values.yaml"))
    (pool,), (objective,) = (
        of_kind(documents, kind) for kind in ("InferencePool", "InferenceObjective")
    )
    labels = workload(documents)["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == "vllm"
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == 9002
    assert objective["spec"]["poolRef"]["name"] == pool["metadata"]["name"]
