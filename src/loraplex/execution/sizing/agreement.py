"""Sizes that all ranks of an engine have: what fits on the one with the least memory."""

import dataclasses

import msgspec
import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.sizing.capacity import MemorySize
from loraplex.kernels.channel import Channel


def agreed_size(size: MemorySize, channel: Channel) -> MemorySize:
    """Return the largest size that fits on every rank. All ranks call this together.

    Raises ConfigError if the ranks disagree about the length of sequences.
    """
    kv = size.kv
    own = [
        *(capacity.num_blocks for capacity in kv.capacities),
        *(capacity.num_host_blocks for capacity in kv.capacities),
        size.adapters.num_pages,
    ]
    shape = torch.tensor([len(own), kv.max_model_len])
    if any(not torch.equal(other, shape) for other in channel.gather(shape)):
        raise ConfigError(
            "the ranks have memory for sequences of different lengths: set max_model_len",
            param="max_model_len",
        )
    gathered = channel.gather(torch.tensor(own))
    least = [int(number) for number in torch.stack(gathered).amin(0)]
    num_groups = len(kv.capacities)
    capacities = tuple(
        msgspec.structs.replace(capacity, num_blocks=blocks, num_host_blocks=host_blocks)
        for capacity, blocks, host_blocks in zip(
            kv.capacities, least[:num_groups], least[num_groups:-1], strict=True
        )
    )
    return MemorySize(
        dataclasses.replace(kv, capacities=capacities),
        dataclasses.replace(size.adapters, num_pages=least[-1]),
    )
