"""Where traces go, by the setting and by OpenTelemetry's variables."""

import sys

import pytest

from loraplex.core.environment import TraceTarget, trace_target
from loraplex.core.errors import ConfigError
from loraplex.frontends.telemetry.tracing import open_traces
from support.naming import naming

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("configured", "variables", "url", "source"),
    [
        ("http://a:4318", {}, "http://a:4318/v1/traces", "otlp_endpoint"),
        ("http://a:4318/", {}, "http://a:4318/v1/traces", "otlp_endpoint"),
        ("http://a/x/v1/traces", {}, "http://a/x/v1/traces", "otlp_endpoint"),
        ("http://a", {BASE: "http://b"}, "http://a/v1/traces", "otlp_endpoint"),
        ("", {BASE: "http://b"}, "http://b/v1/traces", f"variable {BASE}"),
        ("", {BASE: "http://b", OF_TRACES: "http://c/t"}, "http://c/t", f"variable {OF_TRACES}"),
    ],
)
def test_where_they_go(configured, variables, url, source):
    assert trace_target(configured, variables) == TraceTarget(
        url, source, "loraplex", is_setting=source == "otlp_endpoint"
    )


@pytest.mark.parametrize(
    ("configured", "variables"),
    [
        ("", {}),
        ("", {BASE: ""}),
        ("", {BASE: "http://b", "OTEL_TRACES_EXPORTER": "none"}),
        ("http://a", {"OTEL_SDK_DISABLED": "TRUE"}),
    ],
)
def test_nowhere(configured, variables):
    assert trace_target(configured, variables) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SERVICE_NAME": "mine"},
        {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,a=b"},
    ],
)
def test_a_service_that_is_named_already(variables):
    assert trace_target("http://a", variables).service_name is None


def test_a_variable_does_not_stop_a_server_without_the_packages(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "loraplex.frontends.telemetry.otlp", None)
    of_variable, of_setting = trace_target("", {BASE: "http://b"}), trace_target("http://a", {})
    assert open_traces(of_variable) is None
    (record,) = caplog.records
    assert f"variable {BASE} turns traces on, but" in record.message
    assert "pip install opentelemetry-sdk" in record.message
    with pytest.raises(
        ConfigError, match=naming("otlp_endpoint", "loraplex.frontends.telemetry.otlp")
    ):
        open_traces(of_setting)
