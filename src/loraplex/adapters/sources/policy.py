"""Policy for adapter sources: the places and sizes that the operator allows.

Names are checked, then every address of a name; a connection goes to an address that was checked.
So neither a redirect nor a second reply of the name server leads elsewhere.
"""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loraplex.adapters.sources.reference import OBJECT_SCHEMES, gguf_files_of
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import Config
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterTooLargeError,
    ConfigError,
    InvalidAdapterError,
    PermissionDeniedError,
)

HUB_HOSTS = ("huggingface.co", "*.huggingface.co", "*.hf.co")
"""Hosts of the hub, and those to which it redirects its clients."""
ANY_HOST = "*"
_HOST = re.compile(
    rf"\*|(\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f:]+|({'|'.join(OBJECT_SCHEMES)})://[A-Za-z0-9._-]+"
)
_PRIVATE = "the operator allows it with --allow-private-addresses (allow_private_addresses)"
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
"""Names that are never public: RFC 6761, 6762, 8375, and ICANN's reservation of `internal`."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class SourcePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for one load."""

    roots: tuple[str, ...] | None = None
    """Folders that local paths must lie in, links followed; None: any path."""
    closed_folder: str = ""
    """Folder that no local path may lie in, also below a root: the state directory."""
    hosts: tuple[str, ...] | None = None
    """`huggingface.co`, `*.example.org`, `s3://bucket`, or `*`; None: any."""
    allow_private_addresses: bool = False
    max_bytes: int = 4 << 30
    """Maximum size of one adapter."""
    max_kept_bytes: int = 16 << 30
    """Maximum size of all fetched adapters; the least recently used are deleted first."""
    max_seconds: float = 540.0
    """Maximum time for one adapter to arrive."""
    min_bytes_per_second: int = 16 << 10
    """Minimum rate at which it arrives."""
    may_use_kept: bool = False
    """Whether an earlier copy may replace a source that does not respond."""

    def for_operator(self) -> "SourcePolicy":
        """Return the policy for the operator's sources: any path, any host, checked addresses."""
        return msgspec.structs.replace(
            self, roots=None, closed_folder="", hosts=None, may_use_kept=True
        )

    def check_path(self, path: Path, text: str) -> None:
        """Raise PermissionDeniedError for a path that clients may not read.

        `path` has no links left.
        """
        if problem := self.problem_of(path, text):
            raise PermissionDeniedError(problem, param="path")

    def problem_of(self, path: Path, text: str) -> str:
        """Return why clients may not read a path; empty: they may. `path` has no links left."""
        if self.closed_folder and path.is_relative_to(Path(self.closed_folder).resolve()):
            # The canonical adapter files of all tenants are there.
            return f"{text} is in the server's state directory, from which no adapter is loaded"
        # A root that leads nowhere, such as a link to itself, must not close the others.
        if self.roots is None or any(
            path.is_relative_to(os.path.realpath(os.path.expanduser(root))) for root in self.roots
        ):
            return ""
        return (
            f"{text} is outside the folders that adapters may be loaded from "
            f"({', '.join(self.roots) or 'there are none'}); the operator adds a folder with "
            '--allowed-adapter-roots FOLDER, or allowed_adapter_roots = ["FOLDER"] below [server]'
        )

    def check_host(self, host: str) -> None:
        """Raise PermissionDeniedError for a host that the operator did not allow."""
        if self.hosts is not None and not matches(host, self.hosts):
            raise self._refused(host)

    def check_bucket(self, url: str) -> None:
        """Raise PermissionDeniedError for s3://bucket/... unless an entry s3://bucket allows it."""
        scheme, _, rest = url.partition("://")
        bucket = f"{scheme}://{rest.partition('/')[0]}"
        if self.hosts is not None and ANY_HOST not in self.hosts and bucket not in self.hosts:
            raise self._refused(bucket)

    def check_address(self, host: str, address: str) -> None:
        """Raise PermissionDeniedError for an address that is not public."""
        for ip in _meant(ipaddress.ip_address(address.partition("%")[0])):
            never = ip.is_link_local or ip.is_multicast or ip.is_unspecified
            if never or not (ip.is_global or self.allow_private_addresses):
                hint = "" if never else f"; {_PRIVATE}"
                raise PermissionDeniedError(
                    f"{host} is at {address}, which is not a public address{hint}", param="path"
                )

    def addresses(self, host: str, port: int) -> list[str]:
        """Return all addresses of a host, every one checked: connect to these, not to the name.

        Raises PermissionDeniedError, or AdapterLoadError if the name is unknown.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise AdapterLoadError(f"the host {host} is not found: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for address in addresses:
            self.check_address(host, address)
        return addresses

    def check_name(self, host: str) -> None:
        """Raise PermissionDeniedError for a host that by its name alone is not public.

        A proxy resolves the other names, and decides what it connects to.
        """
        address = _written_address(host)
        if address is not None:
            self.check_address(host, address)
            return
        name = host.lower().rstrip(".")
        is_private = "." not in name or name.endswith(_PRIVATE_SUFFIXES)
        if is_private and not self.allow_private_addresses:
            raise PermissionDeniedError(
                f"{host} is not the name of a public host; {_PRIVATE}",
                param="path",
            )

    def too_large(self, what: str) -> AdapterTooLargeError:
        return AdapterTooLargeError(
            f"{what} has more than {readable_bytes(self.max_bytes)}, the maximum of an adapter; "
            "the operator raises it with max_adapter_bytes",
            param="path",
        )

    def _refused(self, host: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"adapters may not be loaded from {host}; the operator allows it with "
            f"--allowed-adapter-hosts {host} (allowed_adapter_hosts)",
            param="path",
        )


def client_policy(config: Config, state_dir: Path, *, has_keys: bool = False) -> SourcePolicy:
    """Return the policy for clients; has_keys: they have API keys. Raises ConfigError."""
    server = config.server
    for host in server.allowed_adapter_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"allowed_adapter_hosts: {host!r} is not a host; write example.org, *.example.org, "
                "s3://bucket or *"
            )
    roots = server.allowed_adapter_roots
    for model in config.models.values():
        roots += (*model.adapter_dirs, *filter(None, (model.lora_root,)))
    # Clients of a server on loopback are on this machine already. With keys there may be a proxy,
    # whose clients are elsewhere.
    is_open = not server.allowed_adapter_roots and server.is_on_loopback and not has_keys
    return SourcePolicy(
        roots=None if is_open else roots,
        closed_folder=str(state_dir),
        hosts=server.allowed_adapter_hosts,
        allow_private_addresses=server.allow_private_addresses,
        max_bytes=server.max_adapter_bytes,
        max_kept_bytes=server.fetched_adapters_bytes,
        max_seconds=server.adapter_download_seconds,
        min_bytes_per_second=server.min_download_bytes_per_second,
    )


def checked_path(text: str, policy: SourcePolicy, file_names: Iterable[str]) -> Path:
    """Return the target of a path, links followed; it and its files are within the roots.

    Raises InvalidAdapterError or PermissionDeniedError.
    """
    if not text or "\0" in text:
        raise InvalidAdapterError(
            "the path of an adapter must be that of a folder, or of a .safetensors or .gguf file",
            param="path",
        )
    try:
        # Checked before the file system is read: a client must not learn what is elsewhere.
        place = Path(text).expanduser().resolve()
        policy.check_path(place, text)
        for name in file_names:
            policy.check_path((place / name).resolve(), f"{text}/{name}")
        for file in gguf_files_of(place):
            policy.check_path(file.resolve(), f"{text}/{file.name}")
        return place.resolve(strict=True)
    except OSError as error:
        raise InvalidAdapterError(f"cannot open the adapter {text}: {error.strerror}") from error
    except RuntimeError as error:
        raise InvalidAdapterError(f"cannot open the adapter {text}: {error}") from error


def matches(host: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns means the host. `*.a.b` means hosts below a.b, not a.b."""
    host = host.lower().rstrip(".")
    return any(
        pattern == ANY_HOST
        or host == pattern.lower()
        or (pattern.startswith("*.") and host.endswith(pattern[1:].lower()))
        for pattern in patterns
    )


def _written_address(host: str) -> str | None:
    """Return the address that a host is, in any notation (127.1, 0x7f000001); None for a name."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.partition("%")[0]))
    with contextlib.suppress(OSError, UnicodeError):
        return socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
    return None


def _meant(ip: IPAddress) -> list[IPAddress]:
    """Return an address, and those that are embedded in it."""
    found: list[IPAddress] = []
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return [ip.ipv4_mapped]
        if ip.sixtofour is not None:
            found.append(ip.sixtofour)
        if ip.teredo is not None:
            found.extend(ip.teredo)
        if ip in _NAT64:
            found.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
            return found
    return [ip, *found]
