"""Download of one file: its limits of size, time and rate, and its result."""

import enum
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from loraplex.adapters.durable_files import reporting_full_disk, storing
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import AdapterLoadError

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0
RATE_SECONDS = 15.0
"""Time over which the rate of a download is measured."""


class Arrived(msgspec.Struct, frozen=True):
    """File that has arrived completely."""

    tag: str
    """Tag that changes when the source's file does; empty if the source has none."""
    sha256: str
    num_bytes: int


class Missing(enum.Enum):
    """Reason, other than an error, for which no file arrived."""

    ABSENT = "there is none"
    UNCHANGED = "it is as it was"


class Allowance:
    """Limit of bytes and seconds for all files of one adapter together, and of their rate."""

    def __init__(
        self, policy: SourcePolicy, what: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.policy = policy
        self.what = what
        self._num_bytes = 0
        self._monotonic = monotonic
        self._deadline = monotonic() + policy.max_seconds
        self._last_logged = monotonic()
        self.measure_rate()

    def require_bytes(self, num_bytes: int) -> None:
        """Raise AdapterTooLargeError if `num_bytes` more exceed the limit."""
        if self._num_bytes + num_bytes > self.policy.max_bytes:
            raise self.policy.too_large(self.what)

    def require_time(self) -> None:
        """Raise AdapterLoadError when the time is up."""
        self._require(0.0)

    def measure_rate(self) -> None:
        """Measure the rate from now on: a file begins to arrive."""
        self._measured_since = self._monotonic()
        self._measured_bytes = 0

    def require_rate(self, num_bytes: int) -> None:
        """Count bytes that arrived just now. Raises AdapterLoadError if they arrive too slowly."""
        self._measured_bytes += num_bytes
        seconds = self._monotonic() - self._measured_since
        if seconds < RATE_SECONDS:
            return
        lowest = self.policy.min_bytes_per_second
        if self._measured_bytes < lowest * seconds:
            raise AdapterLoadError(
                f"{self.what} arrives at {readable_bytes(int(self._measured_bytes / seconds))}/s; "
                f"the minimum is {readable_bytes(lowest)}/s: the operator lowers it with "
                "min_download_bytes_per_second",
                param="path",
            )
        self.measure_rate()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises AdapterLoadError at once if the time would end meanwhile."""
        self._require(seconds)
        time.sleep(seconds)

    def spend(self, num_bytes: int) -> None:
        """Count the bytes of a file that has arrived."""
        self.require_bytes(num_bytes)
        self._num_bytes += num_bytes

    def log_progress(self, num_bytes: int, total: int | None) -> None:
        """Log the progress of a file every few seconds."""
        if self._monotonic() - self._last_logged >= _PROGRESS_SECONDS:
            self._last_logged = self._monotonic()
            of = "" if total is None else f" of {readable_bytes(total)}"
            logger.info("fetching %s: %s%s", self.what, readable_bytes(num_bytes), of)

    def _require(self, seconds: float) -> None:
        if self._monotonic() + seconds > self._deadline:
            raise AdapterLoadError(
                f"{self.what} did not arrive within {self.policy.max_seconds:g} s; try again later"
            )


def write_stream(
    chunks: Iterable[bytes], target: Path, allowance: Allowance, total: int | None
) -> tuple[str, int]:
    """Write chunks to a file; return its SHA-256 and its number of bytes.

    Raises AdapterTooLargeError, AdapterLoadError, StorageFullError, or what `chunks` raises.
    """
    checksum, num_bytes = hashlib.sha256(), 0
    allowance.measure_rate()
    with storing():
        file = target.open("wb")
    # What the source raises is no fault of the state directory.
    with reporting_full_disk(), file:
        for chunk in chunks:
            num_bytes += len(chunk)
            allowance.require_bytes(num_bytes)
            allowance.require_time()
            allowance.require_rate(len(chunk))
            allowance.log_progress(num_bytes, total)
            checksum.update(chunk)
            with storing():
                file.write(chunk)
    return checksum.hexdigest(), num_bytes
