"""Limit of memory that requests share, in total and by tenant."""

import collections
import sys
from typing import Final, Self

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import NotReadyError
from loraplex.core.server_config import ServerConfig

SMALL_BYTES: Final = 64 << 10
"""Part of each body that does not count: large ones must not keep out small requests. Their number
is that of the connections, which has its own limit."""
_DEFAULT_NUM_BODIES: Final = 8
_RETRY_SECONDS: Final = 1.0


class TenantBytes:
    """Bytes of a kind of bodies, in total and by tenant."""

    kind = "request bodies"

    def __init__(self, max_bytes: int = sys.maxsize, max_tenant_bytes: int = sys.maxsize) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self._by_tenant: collections.Counter[str] = collections.Counter()

    @classmethod
    def of(cls, settings: ServerConfig, *, has_keys: bool) -> Self:
        """Return the memory that the settings allow; with keys a tenant has half of it."""
        one = settings.max_body_bytes
        most = max(settings.max_bodies_bytes or _DEFAULT_NUM_BODIES * one, 2 * one)
        return cls(most, most // 2 if has_keys else most)

    @property
    def num_bytes(self) -> int:
        return self._by_tenant.total()

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes. Raises NotReadyError if there are too many, and counts nothing."""
        if (
            self.num_bytes + num_bytes > self.max_bytes
            or self._by_tenant[tenant] + num_bytes > self.max_tenant_bytes
        ):
            raise NotReadyError(
                f"{self.kind} take all of their memory ({readable_bytes(self.max_bytes)} in "
                f"total, {readable_bytes(self.max_tenant_bytes)} for a tenant: max_bodies_bytes): "
                "please try again",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._by_tenant[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
