"""Settings of the serving process; `config` says which values they take."""

import msgspec


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The serving process: addresses and limits."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    max_body_bytes: int = 64 << 20
    state_dir: str = ""
    """Staged adapters, and which names they have; empty: the user's state directory."""
    persist_adapters: bool = True
    """Adapters that were loaded over the API are there after a restart."""
    allowed_adapter_roots: tuple[str, ...] = ()
    """Folders that clients may load adapters from, beside the configured ones; empty: on loopback
    all, elsewhere no more."""
    allowed_adapter_hosts: tuple[str, ...] = ()
    """Hosts that clients may load adapters from: huggingface.co, *.example.org, s3://bucket, *."""
    allow_private_addresses: bool = False
    """Adapters may come from hosts at loopback and private addresses."""
    max_adapter_bytes: int = 4 << 30
    fetched_adapters_bytes: int = 16 << 30
    """Kept of what was fetched; what was used longest ago goes first."""
    adapter_watch_seconds: float = 5.0
    """How often configured folders are looked at for changes; 0: only at the start."""
    log_level: str = "info"
    shutdown_seconds: float = 30.0
    """How long running requests may finish after a stop was asked for."""
