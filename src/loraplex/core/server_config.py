"""Settings of the serving process: addresses, access and limits."""

import functools
import ipaddress
from typing import Annotated, Final

from loraplex.core.adapter_source_settings import AdapterSourceSettings
from loraplex.core.errors import ConfigError
from loraplex.core.metrics_config import read_metrics_config
from loraplex.core.setting import Setting, matching, within

_ORIGIN: Final = r"\*|https?://[A-Za-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-fA-F:]+\](:[0-9]+)?"
_HOST: Final = r"\*|[A-Za-z0-9._-]+"
_server = functools.partial(Setting, "Server")
_access = functools.partial(Setting, "Access")
_limits = functools.partial(Setting, "Limits")
_logs = functools.partial(Setting, "Logs and metrics")
_port = functools.partial(
    _server, check=within(0, 65535, "must be a port from 0 (any free one) to 65535")
)


def _metrics_words(words: tuple[str, ...]) -> str | None:
    try:
        read_metrics_config(words)
    except ConfigError as error:
        return str(error)
    return None


class ServerConfig(AdapterSourceSettings, frozen=True, kw_only=True):
    """The serving process."""

    host: Annotated[
        str,
        _server(
            "Address to bind",
            "An address that other machines reach needs API keys, or `allow_no_keys`.",
        ),
    ] = "127.0.0.1"
    http_port: Annotated[
        int, _port("Port of the OpenAI and KServe protocols over HTTP; 0: any free one")
    ] = 8000
    grpc_port: Annotated[int, _port("Port of the KServe protocol over gRPC")] = 8001
    metrics_port: Annotated[int, _port("Port of the Prometheus metrics")] = 8002
    http: Annotated[bool, _server("Opening of the HTTP port")] = True
    grpc: Annotated[bool, _server("Opening of the gRPC port")] = True
    metrics: Annotated[bool, _server("Opening of the metrics port")] = True
    request_socket: Annotated[
        str,
        _server(
            "Unix socket for Triton requests of processes of the same user",
            "See [Under the real Triton](triton-export.md).",
        ),
    ] = ""
    dialect: Annotated[
        str,
        _server(
            "Dialect of the OpenAI routes: openai, llgtrt or llgtrt_compat",
            "See [llgtrt](llgtrt.md).",
            choices=("openai", "llgtrt", "llgtrt_compat"),
        ),
    ] = "openai"
    state_dir: Annotated[
        str,
        _server(
            "Folder of staged adapters and of their names",
            "One server at a time can use it, unless `persist_adapters` is off. By default each "
            "base model has its own: see [Operations](operations.md#state-and-caches).",
            default="loraplex/models/MODEL in the user's state directory",
        ),
    ] = ""
    frontend_processes: Annotated[
        int,
        _server(
            "Number of processes that take HTTP requests, tokenize prompts and write responses",
            "One of them owns admission, adapters and limits. See "
            "[Operations](operations.md#front-end-processes).",
            check=within(1, 64, "must be from 1 to 64"),
        ),
    ] = 1
    shutdown_seconds: Annotated[
        float,
        _server("Shutdown grace period in seconds, in which running requests may end", minimum=0),
    ] = 30.0
    stop_with_stdin: Annotated[
        bool,
        _server(
            "Stop at the end of standard input",
            "The server then ends with the process that started it.",
        ),
    ] = False
    api_keys_file: Annotated[
        str,
        _access(
            "File of tenants, their rights and limits, and the hashes of their API keys",
            "See [Security](security.md). Without it, and without `LORAPLEX_API_KEYS`, no key is "
            "needed.",
        ),
    ] = ""
    allow_no_keys: Annotated[
        bool,
        _access(
            "Serving other machines without API keys",
            "Without API keys `loraplex serve` refuses a `host` that other machines reach, unless "
            "this is on.",
        ),
    ] = False
    health_needs_key: Annotated[bool, _access("API key for health routes and RPCs, too")] = False
    tls_cert: Annotated[
        str,
        _access(
            "Certificate chain of the server (PEM), for all ports",
            "Files that change are read again within 5 seconds, without a restart.",
            default="no TLS",
        ),
    ] = ""
    tls_key: Annotated[str, _access("Key of the certificate (PEM, without a password)")] = ""
    cors_origins: Annotated[
        tuple[str, ...],
        _access(
            "Origins of web pages that may send requests: https://app.example.org; repeatable",
            "`*` is any.",
            check=matching(_ORIGIN, "must be origins such as https://app.example.org, or *"),
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        _access(
            "Host names under which the HTTP ports are served; repeatable",
            "Addresses and localhost always are. `*` is any. See [Security](security.md"
            "#browsers-and-cors).",
            default="any with API keys or on a host that other machines reach, else none",
            check=matching(_HOST, "must be host names such as models.example.org, or *"),
        ),
    ] = ()
    console: Annotated[
        str,
        _access(
            "Console in the browser, at /console/: auto, on or off",
            "`auto` is on with API keys, and on a host that only this machine reaches; it is off "
            "with the dialects of llgtrt. See [Console](console.md).",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"
    trusted_proxies: Annotated[
        tuple[str, ...],
        _access(
            "Addresses and networks of proxies whose X-Forwarded-For is trusted; repeatable",
            "The header then determines the client's address and scheme.",
        ),
    ] = ()
    max_body_bytes: Annotated[
        int,
        _limits("Maximum size of a request body", "Beyond it: status 413.", minimum=1),
    ] = 64 << 20
    max_bodies_bytes: Annotated[
        int,
        _limits(
            "Maximum memory of the bodies of all connections together; as much again for responses",
            "Beyond it: status 503 and a time to retry after. The first 64 KiB of each body do not "
            "count. With API keys, one tenant has half of it. A request whose log probabilities, "
            "logits or repeated prompts may take more is refused. At least twice `max_body_bytes`.",
            minimum=0,
            default="eight times `max_body_bytes`",
        ),
    ] = 0
    unknown_fields: Annotated[
        str,
        _server(
            "Request fields that no supported server defines: refuse or ignore",
            "`refuse`: status 400 with the nearest name, so that a misspelt `max_tokens` is no "
            "request without a limit. [OpenAI: what is supported](fields-openai.md) lists the "
            "known fields. The dialects of llgtrt ignore them, as llgtrt does.",
            choices=("refuse", "ignore"),
        ),
    ] = "refuse"
    max_json_bytes: Annotated[
        int,
        _limits(
            "Maximum size of the JSON in a request body",
            "Beyond it: status 413. Binary tensors do not count.",
            minimum=1 << 10,
        ),
    ] = 8 << 20
    max_request_values: Annotated[
        int,
        _limits(
            "Maximum number of values in a request: JSON values, or repeated numbers of gRPC",
            "Beyond it: status 413, or `RESOURCE_EXHAUSTED`. Prompts of more token ids need more. "
            "While a request is parsed, all others wait: about 20 ms for 131072 values.",
            minimum=1 << 10,
        ),
    ] = 1 << 17
    max_header_bytes: Annotated[
        int,
        _limits(
            "Maximum size of a request line with its headers, or of gRPC metadata",
            "Beyond it: status 431, or `RESOURCE_EXHAUSTED`.",
            minimum=1 << 10,
        ),
    ] = 64 << 10
    max_headers: Annotated[
        int,
        _limits("Maximum number of headers of a request", "Beyond it: status 431.", minimum=10),
    ] = 100
    max_request_line_bytes: Annotated[
        int,
        _limits("Maximum size of an HTTP request line", "Beyond it: status 414.", minimum=256),
    ] = 8 << 10
    max_connections: Annotated[
        int,
        _limits(
            "Maximum number of open connections, of HTTP and of gRPC each",
            "Beyond it an idle connection is closed, or the new one, over HTTP with status 503. "
            "It is lower where the process may open too few files (`ulimit -Hn`).",
            minimum=1,
        ),
    ] = 4096
    header_timeout_seconds: Annotated[
        float,
        _limits(
            "Time limit in seconds for a request's headers",
            "It runs from the connection's start, or the request's first byte. Beyond it: status "
            "408.",
            minimum=0.001,
        ),
    ] = 20.0
    body_timeout_seconds: Annotated[
        float,
        _limits(
            "Time limit in seconds for a request's body, and for each 256 KiB of a response",
            "A body has it from the end of its headers, an upload for each MiB; beyond it: status "
            "408. A client that reads less of a response in this time is disconnected.",
            minimum=0.001,
        ),
    ] = 120.0
    keep_alive_seconds: Annotated[
        float,
        _limits("Maximum idle time of an HTTP connection in seconds", minimum=0),
    ] = 75.0
    max_grpc_message_bytes: Annotated[
        int,
        _limits(
            "Maximum size of a gRPC request",
            "Beyond it: `RESOURCE_EXHAUSTED`. Responses have no limit.",
            minimum=1 << 10,
        ),
    ] = 64 << 20
    max_grpc_streams: Annotated[
        int,
        _limits(
            "Maximum number of concurrent calls of one gRPC connection",
            "Further calls wait in the client's library.",
            minimum=1,
        ),
    ] = 1024
    grpc_keepalive_seconds: Annotated[
        float,
        _limits(
            "Interval in seconds of pings on quiet gRPC connections",
            "They find clients that are gone.",
            minimum=1,
        ),
    ] = 60.0
    max_stored_responses: Annotated[
        int,
        _limits(
            "Maximum number of stored responses of /v1/responses per tenant; 0: none",
            "See [Responses](responses.md#what-is-kept).",
            minimum=0,
        ),
    ] = 1000
    stored_responses_bytes: Annotated[
        int,
        _limits(
            "Maximum memory of stored responses per tenant",
            "The oldest are removed first.",
            minimum=0,
        ),
    ] = 64 << 20
    stored_responses_seconds: Annotated[
        float, _limits("Maximum age of stored responses in seconds", minimum=1)
    ] = 86400.0
    access_log: Annotated[
        str,
        _logs(
            "File for one JSON object per request; - is standard output",
            "See [Operations](operations.md#access-log).",
        ),
    ] = ""
    access_log_prompts: Annotated[bool, _logs("Prompts in the access log")] = False
    log_requests: Annotated[
        str,
        _logs(
            "Requests in the server's log, one line each: off, sampled or all",
            "`sampled`: requests that generate or fail, at most 5 a second; the next line has the "
            "number of the others. `access_log` is complete, and JSON.",
            choices=("off", "sampled", "all"),
        ),
    ] = "sampled"
    recent_requests: Annotated[
        int,
        _logs(
            "Maximum number of ended requests that /v1/requests returns; 0: only open ones",
            "Each front-end process keeps so many, in at most 4 KiB for each.",
            minimum=0,
            maximum=100_000,
        ),
    ] = 1000
    otlp_endpoint: Annotated[
        str,
        _logs(
            "OpenTelemetry collector for traces, such as http://host:4318",
            "Needs `loraplex[tracing]`. `OTEL_EXPORTER_OTLP_ENDPOINT` does the same. See "
            "[Operations](operations.md#traces).",
            check=matching(r"|https?://[^\s/?#]+[^\s]*", "must be an address as http://host:4318"),
        ),
    ] = ""
    log_level: Annotated[
        str,
        _logs(
            "Log level: debug, info, warning or error",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"
    log_format: Annotated[
        str,
        _logs(
            "Format of log lines: text or json",
            "`json`: one object a line, with `time`, `level`, `source`, `message`, and in a "
            "request `request_id` and `trace_id`.",
            choices=("text", "json"),
            value_aliases={"default": "text", "ISO8601": "text"},
        ),
    ] = "text"
    metrics_config: Annotated[
        tuple[str, ...],
        _logs(
            "Triton's latency metrics as NAME=VALUE: summary_latencies=true; repeatable",
            "Names and values are those of tritonserver's flag: `counter_latencies=false`, "
            "`histogram_latencies=true` (`nv_inference_first_response_histogram_ms`), "
            "`summary_latencies=true` (`nv_inference_*_summary_us`, quantiles of the last minute) "
            "and `summary_quantiles=0.5:0.05,0.9:0.01`.",
            check=_metrics_words,
            has_commas=False,
        ),
    ] = ()
    metrics_cache_seconds: Annotated[
        float,
        _logs(
            "Time in seconds for which scrapes of the metrics get the same text; 0: each its own",
            "A text that takes long to make, with many adapters, is kept for 10 times as long.",
            minimum=0,
            maximum=60,
        ),
    ] = 0.04
    max_reported_adapters: Annotated[
        int,
        _logs(
            "Maximum number of adapters that one of the gateways' metric families names",
            "See [Kubernetes](kubernetes.md#metrics-of-the-gateways).",
            minimum=1,
            maximum=1_000_000,
        ),
    ] = 1000

    def has_console(self, *, has_keys: bool) -> bool:
        """Return whether the console is served. has_keys: clients need API keys."""
        if self.console != "auto":
            return self.console == "on"
        return self.dialect == "openai" and (has_keys or self.is_on_loopback)

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
