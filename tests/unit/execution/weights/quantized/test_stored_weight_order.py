"""Inputs of a quantised weight in another order, as GGUF files have those of value heads."""

import pytest
import torch

from loraplex.core.gguf import BlockType
from loraplex.execution.weights.quantized.gguf import decoded_blocks
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from support.gguf_files import random_blocks

KINDS = (BlockType.Q8_0, BlockType.Q4_1, BlockType.Q4_K, BlockType.Q6_K, BlockType.IQ4_XS)
NUM_INPUTS = 512


def stored(kind: BlockType) -> StoredWeight:
    rows = random_blocks(kind.name, 3, NUM_INPUTS)
    found = decoded_blocks("w", bytearray(rows.tobytes()), kind, (3, NUM_INPUTS))
    assert isinstance(found, StoredWeight)
    return found


@pytest.mark.parametrize("size", [128, 32, 16, 1], ids="heads of {}".format)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_go_with_their_inputs(kind: BlockType, size: int) -> None:
    weight = stored(kind)
    heads = torch.randperm(NUM_INPUTS // size, generator=torch.Generator().manual_seed(0))
    order = (heads[:, None] * size + torch.arange(size)).flatten()
    found = weight.reordered(order).checked("w")
    assert torch.equal(found.decoded(), weight.decoded()[:, order])
    assert (found.groups_of_inputs is None) == (size >= weight.group_size)


def test_an_order_can_follow_another() -> None:
    weight = stored(BlockType.Q8_0)
    order = torch.randperm(NUM_INPUTS, generator=torch.Generator().manual_seed(1))
    back = torch.argsort(order)
    assert torch.equal(weight.reordered(order).reordered(back).decoded(), weight.decoded())
