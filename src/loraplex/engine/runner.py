"""What the engine needs from the data plane: execution gives it, and testing.FakeRunner."""

from collections.abc import Sequence
from typing import Protocol

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import Capacity, StepPlan, StepResult


class StepHandle(Protocol):
    """A step in flight."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises StepFailedError if it failed as a whole."""
        ...


class Runner(Protocol):
    """Computes plans. Owns the weights, the KV storage, the adapter pool and the sampler."""

    def capacity(self) -> Capacity:
        """What it can hold: constant for its life."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. Plans are launched, and waited for, in order of step_id.

        A step without rows starts adapter copies, or only asks for the end of those under way: it
        may wait for one. After a failed step the engine does not know what was done of its plan:
        the next plan names its removed slots, its rows' slots and its adapter copies (with the
        same pages) again. So a removed slot may be empty, and a copy may be started twice; its end
        is told once.

        With overlap one more plan may be launched before the oldest is waited for. If that one
        fails, the one behind it need not be computed: whatever its `wait` gives is not used.
        """
        ...

    def close(self) -> None: ...


class HostLoad(Protocol):
    """One finished read of a canonical adapter file into the host tier."""

    @property
    def handle(self) -> AdapterHandle: ...

    @property
    def error(self) -> ErrorInfo | None: ...

    @property
    def load_ns(self) -> int:
        """How long it took."""
        ...


class AdapterLoader(Protocol):
    """Reads staged adapters into host memory, beside the steps. The adapter cache decides which."""

    def start(self, handle: AdapterHandle, source: AdapterSource) -> None:
        """Begin to read; returns at once."""
        ...

    def poll(self) -> Sequence[HostLoad]:
        """The loads that ended since the last call."""
        ...

    def discard(self, handle: AdapterHandle) -> None:
        """Forget the host copy."""
        ...

    def close(self) -> None: ...
