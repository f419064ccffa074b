"""Measures the host's time in the parts of one step."""

import time

from loraplex.core.plan import StepTiming


class StepWatch:
    """`watch.forward_ns += watch.lap()`, and so on."""

    def __init__(self, prepare_ns: int) -> None:
        """prepare_ns: spent before."""
        self.prepare_ns = prepare_ns
        self.forward_ns = 0
        """Time until the forward pass is enqueued, plus, on an accelerator, until it has ended."""
        self.sample_ns = 0
        self.lora_ns: int | None = None
        """Part of forward_ns; None: not measured."""
        self._last_ns = time.monotonic_ns()

    def lap(self) -> int:
        """Return the time since the last call."""
        last_ns, self._last_ns = self._last_ns, time.monotonic_ns()
        return self._last_ns - last_ns

    def add_lora(self, before_ns: int | None, after_ns: int | None) -> None:
        """Add the time between two counts of the backend."""
        if before_ns is not None and after_ns is not None:
            self.lora_ns = (self.lora_ns or 0) + after_ns - before_ns

    def timing(self, copy_ns: int) -> StepTiming:
        return StepTiming(
            self.prepare_ns, self.forward_ns, self.sample_ns, copy_ns, lora_ns=self.lora_ns
        )
