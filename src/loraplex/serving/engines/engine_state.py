"""States of an engine as serving sees them, and how it ends."""

import enum


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    """It cannot start: the reason is in `AsyncEngine.failure`."""
    CLOSED = "closed"


class EngineEnd(enum.StrEnum):
    """Reason why an engine ended that was not stopped."""

    CRASH = "crash"
    """Its process ended, or could not be started again."""
    HANG = "hang"
    """The watchdog killed it."""
    KILL = "kill"
    """Something else killed it, such as a system short of memory."""
