"""Settings of the serving process; `config` says which values they take."""

import msgspec


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The serving process: addresses and limits."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    http: bool = True
    """Whether http_port is opened."""
    grpc: bool = True
    """Whether grpc_port is opened."""
    metrics: bool = True
    """Whether metrics_port is opened."""
    request_socket: str = ""
    """A unix socket that takes Triton requests of processes of the same user; empty: none."""
    stop_with_stdin: bool = False
    """The server stops when its standard input ends: when whoever started it has gone."""
    dialect: str = "openai"
    """What the OpenAI room does another server's way: openai, llgtrt or llgtrt_compat."""
    api_keys_file: str = ""
    """Tenants, their rights and limits, and the hashes of their API keys; empty: as far as the
    environment's LORAPLEX_API_KEYS names none either, nobody is asked for a key."""
    allow_no_keys: bool = False
    """Without API keys `loraplex serve` listens on loopback only, unless this is set."""
    health_needs_key: bool = False
    """Also whether the server is live, and ready, is told only with a key."""
    tls_cert: str = ""
    """The server's certificate, and those of who signed it (PEM), for all ports; empty: no TLS."""
    tls_key: str = ""
    """The certificate's key (PEM, without a password)."""
    cors_origins: tuple[str, ...] = ()
    """Web pages from these origins may ask (https://app.example.org; * is any); empty: none."""
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    """Request line and headers of HTTP, metadata of gRPC."""
    max_headers: int = 100
    max_request_line_bytes: int = 8 << 10
    max_connections: int = 4096
    """Open at once, of HTTP and of gRPC each."""
    header_timeout_seconds: float = 20.0
    """From a connection's start, or a request's first byte, to the end of its headers."""
    body_timeout_seconds: float = 120.0
    """From the end of the headers to the end of the body."""
    keep_alive_seconds: float = 75.0
    """How long an HTTP connection may be idle between two requests."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose X-Forwarded-For tells who the client is."""
    max_grpc_message_bytes: int = 256 << 20
    """Of a gRPC request; answers have no limit."""
    max_grpc_streams: int = 1024
    """Calls that one gRPC connection has at once; more wait in the client."""
    grpc_keepalive_seconds: float = 60.0
    """How often a quiet gRPC connection is asked whether somebody is there."""
    access_log: str = ""
    """A file for one JSON object per request, `-` for standard output; empty: none."""
    access_log_prompts: bool = False
    """The access log holds prompts, too."""
    otlp_endpoint: str = ""
    """An OpenTelemetry collector for traces, as http://host:4318; empty: none, unless
    OpenTelemetry's own variables name one."""
    state_dir: str = ""
    """Staged adapters, and which names they have; empty: the user's state directory."""
    persist_adapters: bool = True
    """Adapters that were loaded over the API are there after a restart."""
    allowed_adapter_roots: tuple[str, ...] = ()
    """Folders that clients may load adapters from, beside the configured ones; empty: on loopback
    without API keys all, else no more."""
    allowed_adapter_hosts: tuple[str, ...] = ()
    """Hosts that clients may load adapters from: huggingface.co, *.example.org, s3://bucket, *."""
    allow_private_addresses: bool = False
    """Adapters may come from hosts at loopback and private addresses."""
    max_adapter_bytes: int = 4 << 30
    fetched_adapters_bytes: int = 16 << 30
    """Kept of what was fetched; what was used longest ago goes first."""
    adapter_watch_seconds: float = 5.0
    """How often configured folders are looked at for changes; 0: only at the start."""
    max_stored_responses: int = 1000
    """Of the Responses API, that each tenant can get again or go on from; 0: none is kept."""
    stored_responses_bytes: int = 64 << 20
    """Of each tenant, in memory."""
    stored_responses_seconds: float = 86400.0
    """How long they are kept at most."""
    metrics_config: tuple[str, ...] = ()
    """NAME=VALUE of Triton's --metrics-config: counter_latencies, histogram_latencies,
    summary_latencies (true or false), summary_quantiles."""
    cpu_metrics: bool = True
    """Whether the metrics port tells of the machine's CPUs (nv_cpu_*)."""
    gpu_metrics: bool = True
    """Whether the metrics port tells of the machine's GPUs (nv_gpu_*)."""
    log_level: str = "info"
    shutdown_seconds: float = 30.0
    """How long running requests may finish after a stop was asked for."""
