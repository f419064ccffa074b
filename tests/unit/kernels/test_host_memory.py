import pytest
import torch

from loraplex.kernels.host_tensors import zeroed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_is_zero_aligned_and_writable(dtype):
    tensor = zeroed((3, 5, 7), dtype)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr() % 4096) == ((3, 5, 7), dtype, 0)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[1, 2] = 3
    assert tensor.float().sum() == 21


def test_nothing_is_nothing():
    assert zeroed((0, 4), torch.float32).shape == (0, 4)


def test_takes_memory_only_where_it_is_touched():
    def resident_kib():
        with open("/proc/self/smaps_rollup") as rollup:
            return next(int(line.split()[1]) for line in rollup if line.startswith("Rss:"))

    before = resident_kib()
    tensor = zeroed((1 << 30,), torch.int8)
    tensor[:4096] = 1
    assert resident_kib() - before < 1 << 16
