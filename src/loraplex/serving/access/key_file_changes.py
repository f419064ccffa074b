"""What `loraplex keys` does to a file of keys: under a lock, and by a new file in its place."""

import contextlib
import datetime
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loraplex.core.errors import ConfigError
from loraplex.core.principal import ALL, Names, Principal, tenant_table
from loraplex.serving.access.api_keys import digest_of, new_key, new_key_id
from loraplex.serving.access.key_file import check_tenant, parse_key_file, read_key_file

_HEAD = b"# Tenants of loraplex and the hashes of their API keys: `loraplex keys --help`.\n"
_NEW_TENANT = """
{table}
use = "all"
list = "all"
manage = "{manage}"
models = "all"
operator = false
"""
_NEW_OPERATOR = """
{table}
operator = true
"""
_NEW_KEY = """
[[keys]]
id = "{id}"
tenant = "{tenant}"
sha256 = "{sha256}"
created = {created}
"""
_REVOKED = """
[[revoked]]
id = "{id}"
"""
_ONLY_OWNER = 0o600


def create_key(
    path: Path,
    tenant: str,
    now: datetime.datetime,
    *,
    is_operator: bool = False,
    may_manage: bool = False,
) -> tuple[str, str, bool]:
    """A new key of a tenant in the file, which is made if there is none.

    (id, key, whether the tenant is new). The key itself is nowhere else. is_operator, may_manage:
    rights of a new tenant. Raises ConfigError; then nothing has changed.
    """
    check_tenant(tenant, "--tenant")
    with _changing(path) as old:
        known = parse_key_file(old, str(path))
        is_new = tenant not in known.tenants
        key, key_id = new_key(), new_key_id()
        added = ""
        if is_new:
            added = (_NEW_OPERATOR if is_operator else _NEW_TENANT).format(
                table=tenant_table(tenant), manage="all" if may_manage else "none"
            )
            if is_operator and may_manage:
                added += 'manage = "all"\n'
        elif is_operator and not known.tenants[tenant].rights.operator:
            raise _without_right(known.tenants[tenant], path, "operator")
        elif may_manage and not known.tenants[tenant].rights.manage:
            raise _without_right(known.tenants[tenant], path, "manage", ALL)
        created = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        added += _NEW_KEY.format(
            id=key_id, tenant=tenant, sha256=digest_of(key).hex(), created=created
        )
        _replace(path, (old or _HEAD) + added.encode())
    return key_id, key, is_new


def _without_right(
    tenant: Principal, path: Path, right: str, names: Names | None = None
) -> ConfigError:
    """Return the error about a right that a tenant of the file does not have."""
    return ConfigError(
        f"tenant {tenant.tenant!r} is in {path} already: {tenant.right_line(right, names)}"
    )


def revoke_key(path: Path, key_id: str) -> None:
    """The server takes it no longer. Raises ConfigError for an unknown id."""
    read_key_file(path)
    with _changing(path) as old:
        known = parse_key_file(old, str(path))
        if key_id in known.revoked:
            return
        if key_id not in [key.id for key in known.keys]:
            raise ConfigError(f"{path} has no key with id {key_id!r}: see loraplex keys list")
        _replace(path, old + _REVOKED.format(id=key_id).encode())


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[bytes]:
    """Yield the content of the file, empty if there is none, and lock out other writers."""
    lock = path.with_name(path.name + ".lock")
    try:
        with open(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _ONLY_OWNER), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(
            f"cannot change api_keys_file {path}: {error.strerror or error}"
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Write the whole file or nothing. A link stays a link; only the owner may read a new file."""
    parse_key_file(content, str(path))
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        if target.exists():
            _keep_owner(target, name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _keep_owner(old: Path, new: str) -> None:
    """A server of another user must be able to read on; group's reading stays if it was there."""
    status = old.stat()
    if (status.st_uid, status.st_gid) != (os.getuid(), os.getgid()):
        os.chown(new, status.st_uid, status.st_gid)
    os.chmod(new, _ONLY_OWNER | (stat.S_IMODE(status.st_mode) & stat.S_IRGRP))
