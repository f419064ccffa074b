"""What holds for every test."""

from loraplex.core.environment import let_threads_sleep

# Several test processes share few cores: before anything imports torch.
let_threads_sleep()
