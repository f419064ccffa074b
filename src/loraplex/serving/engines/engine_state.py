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
    """How an engine ended without being asked to."""

    CRASH = "crash"
    """By itself, or it could not start again."""
    HANG = "hang"
    """The watchdog killed it."""
    KILL = "kill"
    """Something else killed it, such as a system short of memory."""
