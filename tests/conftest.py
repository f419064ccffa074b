"""What holds for every test."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from loraplex.core.environment import let_threads_sleep

# Tests start programs of `support` with `python -m`.
_PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

# Several test processes share few cores: before anything imports torch.
let_threads_sleep()

# Without a GPU its kernels are interpreted. Triton asks when it meets a kernel: before any import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test may fail because the machine is slow.
settings.register_profile("loraplex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loraplex")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A server's log settings, and its start, set it for the whole process."""
    loggers = logging.getLogger(), logging.getLogger("loraplex")
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
