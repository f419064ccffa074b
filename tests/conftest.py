"""What holds for every test."""

from hypothesis import HealthCheck, settings

from loraplex.core.environment import let_threads_sleep

# Several test processes share few cores: before anything imports torch.
let_threads_sleep()

# No test may fail because the machine is slow.
settings.register_profile("loraplex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loraplex")
