"""Writing keys and values by the GPU's program, interpreted, as the reference rounds them."""

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.ops import AttentionShape, Storage, to_stored
from support.paged_rows import stored_parts

pytestmark = pytest.mark.slow

HOST = torch.device("cpu")
SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32, block_size=16)


def stored_as_int8(storage: Storage, shape: AttentionShape) -> list[torch.Tensor]:
    """Keys and values, [slots, K, D + 4], as `to_stored` has them."""
    parts = [stored_parts(tensor, shape) for tensor in storage.tensors]
    return [torch.cat(each, -1).flatten(0, 1) for each in parts]


@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(4, 4, 24, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_int8_is_rounded_as_the_reference_rounds(shape, dtype):
    kernel = CudaAttention(HOST, batch_invariant=False)
    storage = kernel.allocate(4, shape, torch.int8)
    key, value = torch.randn(2, 9, shape.num_kv_heads, shape.head_dim).to(dtype)
    key[0] = 0
    key[1, 0, 3], key[2, 0, 3], value[3, 0, 0] = torch.nan, torch.inf, -torch.inf
    value[4] = torch.arange(shape.head_dim) - 12.5  # ties, where the scale is 1/2 or 1/4 or so
    value[4, :, 0] = 127 / 4
    key[5] *= 1e-6
    if dtype == torch.float32:
        key[6] *= 1e-40  # the scale is no normal number
    slots = torch.randperm(4 * shape.block_size)[:9]
    kernel.write(storage, key, value, slots)
    stored = stored_as_int8(storage, shape)
    for found, vectors in zip(stored, (key, value), strict=True):
        assert torch.equal(found[slots], to_stored(vectors, torch.int8))


def test_int8_refuses_scales_that_are_not_aligned():
    with pytest.raises(ConfigError):
        CudaAttention(HOST, batch_invariant=False).allocate(
            2, AttentionShape(1, 1, 6, 1), torch.int8
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_storage_has_the_bytes_of_its_shape(dtype):
    storage = CudaAttention(HOST, batch_invariant=False).allocate(3, SHAPE, dtype)
    assert storage.num_bytes == 3 * SHAPE.block_bytes(dtype)


def test_write_takes_slices_and_skips_padding():
    kernel = CudaAttention(HOST, batch_invariant=False)
    storage = kernel.allocate(2, SHAPE, torch.float32)
    fused = torch.randn(4, 8 + 2 + 2, 32)
    _, key, value = fused.split([8, 2, 2], 1)
    kernel.write(storage, key, value, torch.tensor([17, -1, 0, 31]))
    for tensor, given in ((storage.tensors[0], key), (storage.tensors[1], value)):
        expected = torch.zeros(32, 2, 32)
        expected[[17, 0, 31]] = given[[0, 2, 3]]
        assert torch.equal(tensor.view(32, 2, 32), expected)
