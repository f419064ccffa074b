"""Protocols that the engine needs from the data plane; `execution` implements them."""

from collections.abc import Collection, Sequence
from typing import Protocol

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import Capacity, StepPlan, StepResult


class StepHandle(Protocol):
    """Step in flight."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises StepFailedError if it failed as a whole."""
        ...


class Runner(Protocol):
    """Computes plans. Owns the weights, the KV storage, the adapter pool and the sampler."""

    def capacity(self) -> Capacity:
        """Return its limits, which never change."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Plans are launched, and waited for, in order of step_id.

        A step without rows starts adapter copies, or only collects the end of started ones: it may
        wait for one. After a failed step the engine does not know how much of its plan was done.
        So the next plan names its removed slots, its rows' slots and its adapter copies (with the
        same pages) again: a removed slot may be empty, and a copy may be started twice, but its
        end is reported once.

        Up to Capacity.num_stages plans, and one more with overlap, are launched before the oldest
        is waited for. If that one fails, those launched after it need not be computed: the results
        of their `wait` are not used.
        """
        ...

    def close(self) -> None: ...


class RankProbes(Protocol):
    """The processes that compute plans together with a runner: whether each still does."""

    def probe(self) -> None:
        """Let each rank reply when it takes its next commands. Raises DeviceLost."""
        ...

    def silent(self) -> Collection[int]:
        """Return the ranks that have not replied to the last probe. Raises DeviceLost."""
        ...


class HostLoad(Protocol):
    """Finished load of a canonical adapter file into host memory."""

    @property
    def handle(self) -> AdapterHandle: ...

    @property
    def error(self) -> ErrorInfo | None: ...

    @property
    def load_ns(self) -> int:
        """Duration of the load."""
        ...


class AdapterLoader(Protocol):
    """Reads staged adapters into host memory, concurrently with the steps."""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        """Begin to read; returns at once."""
        ...

    def poll(self) -> Sequence[HostLoad]:
        """Return the loads that ended since the last call."""
        ...

    def discard(self, handle: AdapterHandle) -> None:
        """Forget the host copy."""
        ...

    def close(self) -> None: ...
