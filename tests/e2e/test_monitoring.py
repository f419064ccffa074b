"""The dashboard and the alerts of deploy/monitoring name only what a running server exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loraplex.core.errors import ERROR_CLASSES

pytestmark = pytest.mark.xdist_group("server")

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to every series."""
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "5m"}


def dashboard():
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def alerts():
    [group] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions():
    """Return (place, expression, text with labels) of each panel and each alert."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], with_values(target["expr"]), target["legendFormat"]
    for alert in alerts():
        texts = " ".join(alert["annotations"].values()).replace("$labels.", "")
        yield alert["alert"], alert["expr"], texts


def with_values(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.fixture(scope="module")
def exported(server):
    """Return the values of each label of each metric, after requests of every end."""
    for model in ("capitals", "chinese"):
        body = {"model": model, "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
    assert server.post("/v1/completions", {"model": "chinese", "prompt": "x " * 5000})[0] == 400
    series = {"up": {label: set() for label in OF_PROMETHEUS}}
    for family in text_string_to_metric_families(server.get("/metrics", server.metrics_port)[1]):
        for sample in family.samples:
            labels = series.setdefault(sample.name, {label: set() for label in OF_PROMETHEUS})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return series


def nodes(expression):
    found = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return found


@pytest.mark.parametrize(
    ("expression", "text"),
    [pytest.param(*rest, id=place) for place, *rest in expressions()],
)
def test_every_metric_and_label_is_exported(exported, expression, text):
    selected, kept = set(), None
    for node in nodes(expression):
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name in exported, f"no server exports {node.name}"
            selected |= exported[node.name].keys()
            for matcher in node.matchers.matchers:
                check_values(matcher, exported[node.name])
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            kept = set(node.modifier.labels)
            assert kept <= set().union(*(exported[name].keys() for name in names(node)))
        elif isinstance(node, promql_parser.AggregateExpr):
            kept = set() if kept is None else kept
    shown = set(re.findall(r"{{ *(\w+) *}}", text))
    assert shown <= (selected if kept is None else kept)


def names(node):
    return [
        one.name for one in nodes(node.prettify()) if isinstance(one, promql_parser.VectorSelector)
    ]


def check_values(matcher, labels):
    assert matcher.name in labels
    if matcher.name == "code":
        assert set(matcher.value.split("|")) <= ERROR_CLASSES.keys()
    elif matcher.value != ".*" and matcher.name not in OF_PROMETHEUS:
        assert matcher.value in labels[matcher.name]


def test_the_dashboard_is_one_that_grafana_can_import():
    board = dashboard()
    assert [variable["name"] for variable in board["templating"]["list"]] == [
        "datasource",
        "model",
        "instance",
    ]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"]
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"]


def test_every_panel_and_alert_is_in_the_documentation():
    page = (MONITORING.parents[1] / "docs" / "monitoring.md").read_text()
    for panel in panels():
        assert f"| {panel['title']} |" in page
    for alert in alerts():
        assert f"`{alert['alert']}`" in page


def test_prometheus_reads_the_alerts_and_the_job_that_they_name():
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    [job] = config["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in next(iter(alerts()))["expr"]


def test_every_alert_has_a_case_that_fires():
    tests = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in alerts()}


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=["configuration", "alerts"],
)
def test_promtool(command):
    """Prometheus has no package on PyPI; Debian's `prometheus` has promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    run = subprocess.run(
        [promtool, *command],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
