"""Helpers for tests and demonstrations of programs that use loraplex: a server, a clock."""

from loraplex.testing.fake_clock import FakeClock
from loraplex.testing.running_server import PORT_FLAGS, RunningServer, running, serving

__all__ = ["PORT_FLAGS", "FakeClock", "RunningServer", "running", "serving"]
