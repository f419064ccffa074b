"""Settings of where adapters come from, and of how they are loaded and kept."""

import functools
from typing import Annotated

from loraplex.core.setting import Setting, Settings

_adapters = functools.partial(Setting, "Adapters")


class AdapterSourceSettings(Settings, frozen=True, kw_only=True):
    """The serving process's part for adapters."""

    persist_adapters: Annotated[
        bool,
        _adapters(
            "Adapters that were loaded over the API are loaded again after a restart",
            "Adapters that came in a request, too.",
        ),
    ] = True
    allowed_adapter_roots: Annotated[
        tuple[str, ...],
        _adapters(
            "Folders that clients may load adapters from; repeatable",
            "`adapter_dirs` and `lora_root` are always allowed. Symbolic links in them may lead to "
            "all of these folders.",
            default="all without API keys on a loopback host, else none",
        ),
    ] = ()
    allowed_adapter_hosts: Annotated[
        tuple[str, ...],
        _adapters(
            "Hosts that clients may load adapters from: huggingface.co, s3://bucket; repeatable",
            "Also `*.example.org`, and `*` for any.",
        ),
    ] = ()
    allow_private_addresses: Annotated[
        bool,
        _adapters(
            "Loading of adapters from hosts at loopback and private addresses",
            "Link-local addresses are never allowed.",
        ),
    ] = False
    max_adapter_bytes: Annotated[
        int,
        _adapters(
            "Maximum size of an adapter, from any source",
            minimum=1,
        ),
    ] = 4 << 30
    fetched_adapters_bytes: Annotated[
        int,
        _adapters(
            "Maximum size of the cache of downloaded adapters in state_dir",
            "The files that were used longest ago are removed first.",
            minimum=0,
        ),
    ] = 16 << 30
    adapter_load_seconds: Annotated[
        float,
        _adapters(
            "Time limit in seconds to read and check an adapter, without its download",
            minimum=0.001,
        ),
    ] = 120.0
    adapter_download_seconds: Annotated[
        float,
        _adapters("Time limit in seconds for the download of an adapter", minimum=0.001),
    ] = 540.0
    min_download_bytes_per_second: Annotated[
        int,
        _adapters(
            "Minimum rate of an adapter's download; 0: any",
            "A download that is slower for 15 seconds ends with status 503.",
            minimum=0,
        ),
    ] = 16 << 10
    staging_workers: Annotated[
        int,
        _adapters(
            "Number of processes that read adapters, and of those that download them",
            "A tenant runs as many loads at a time. A tenant without a load in progress gets a "
            "process of its own, up to 12 more.",
            minimum=1,
        ),
    ] = 4
    adapter_watch_seconds: Annotated[
        float,
        _adapters(
            "Interval in seconds in which adapter folders are checked for changes; 0: never",
            "The folders are `adapter_dirs`, `lora_root` and the file `multi_lora`. The documents "
            "of `adapter_declarations` are read as often.",
            minimum=0,
        ),
    ] = 5.0
    adapter_declarations: Annotated[
        str,
        _adapters(
            "Folder or object store (s3://bucket/prefix) of adapter names that servers share",
            "Each name has a JSON document. A load through one server is then visible in all. See "
            "[Replicas](replicas.md).",
        ),
    ] = ""
    uploads: Annotated[
        bool,
        _adapters(
            "Uploads of adapters over HTTP by clients that may manage adapters",
            "See [Adapters](adapters.md#uploads). Not with `adapter_declarations`: other servers "
            "cannot read what one of them received.",
        ),
    ] = False
    max_uploads: Annotated[
        int,
        _adapters("Maximum number of uploads of a tenant at a time", minimum=1),
    ] = 16
    upload_bytes: Annotated[
        int,
        _adapters(
            "Maximum size of all uploads of a tenant together",
            "One upload is limited by `max_adapter_bytes`.",
            minimum=1,
        ),
    ] = 8 << 30
    upload_seconds: Annotated[
        float,
        _adapters(
            "Time in seconds after its last change in which an upload can be loaded",
            "Its files are then removed.",
            minimum=1,
        ),
    ] = 1200.0
    max_adapter_declarations: Annotated[
        int,
        _adapters(
            "Maximum number of documents in `adapter_declarations`",
            "With more of them nothing is read, and the adapters stay as they are.",
            minimum=1,
        ),
    ] = 100_000
