"""One file on its way: how much of it may come, in what time, and what it was."""

import dataclasses
import enum
import hashlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.errors import AdapterLoadError

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """A file that is whole on the disk."""

    tag: str
    """By which the source tells whether it has changed; empty: it does not tell."""
    sha256: str
    num_bytes: int


class Missing(enum.Enum):
    """Why a file did not arrive, without an error."""

    ABSENT = "there is none"
    UNCHANGED = "it is as it was"


class Allowance:
    """The bytes and the seconds that all files of one adapter have together."""

    def __init__(self, policy: SourcePolicy, what: str) -> None:
        self.policy = policy
        self.what = what
        self._num_bytes = 0
        self._deadline = time.monotonic() + policy.max_seconds
        self._told = time.monotonic()

    def require_room(self, num_bytes: int) -> None:
        """Raises AdapterTooLargeError if so many more would be too many."""
        if self._num_bytes + num_bytes > self.policy.max_bytes:
            raise self.policy.too_large(self.what)

    def require_time(self) -> None:
        """Raises AdapterLoadError when the time is up."""
        self._require(0.0)

    def wait(self, seconds: float) -> None:
        """Sleep. Raises AdapterLoadError at once if the time would be up."""
        self._require(seconds)
        time.sleep(seconds)

    def spend(self, num_bytes: int) -> None:
        """A file of so many bytes has arrived."""
        self.require_room(num_bytes)
        self._num_bytes += num_bytes

    def tell(self, num_bytes: int, total: int | None) -> None:
        """Log how far a file is, now and then."""
        if time.monotonic() - self._told >= _PROGRESS_SECONDS:
            self._told = time.monotonic()
            of = "" if total is None else f" of {total / 2**20:.1f}"
            logger.info("fetching %s: %.1f%s MiB", self.what, num_bytes / 2**20, of)

    def _require(self, seconds: float) -> None:
        if time.monotonic() + seconds > self._deadline:
            raise AdapterLoadError(
                f"{self.what} did not arrive within {self.policy.max_seconds:g} s; try again later"
            )


def write_stream(
    chunks: Iterable[bytes], target: Path, allowance: Allowance, total: int | None
) -> tuple[str, int]:
    """Write chunks to a file; return its SHA-256 and its number of bytes.

    Raises AdapterTooLargeError, AdapterLoadError, or what `chunks` raises.
    """
    checksum, num_bytes = hashlib.sha256(), 0
    with target.open("wb") as file:
        for chunk in chunks:
            num_bytes += len(chunk)
            allowance.require_room(num_bytes)
            allowance.require_time()
            allowance.tell(num_bytes, total)
            checksum.update(chunk)
            file.write(chunk)
    return checksum.hexdigest(), num_bytes
