"""How many threads tests of tiny models have, and staging workers that they share."""

from collections.abc import Iterator

import pytest
import torch

from support.kept_staging import keeping_staging_processes


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on two threads, and much slower next to other tests."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="module")
def _shared_staging() -> Iterator[None]:
    with keeping_staging_processes():
        yield
