"""What holds for every test."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

from loraplex.core.environment import let_threads_sleep

# Several test processes share few cores: before anything imports torch.
let_threads_sleep()

# Without a GPU its kernels are interpreted. Triton asks when it meets a kernel: before any import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test may fail because the machine is slow.
settings.register_profile("loraplex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loraplex")
