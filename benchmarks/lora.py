"""Multi-LoRA on fused linear layers: native kernels against the torch reference, in one run.

    python benchmarks/lora.py [--json] [--threads 2] [--seconds 0.3]

A time is the least of many calls: the machine is shared. Decoding steps have one token per adapter;
prefill has many tokens of one. GB/s counts the pages that the adapters need, once; GFLOP/s counts
both products.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from against_reference import figures, least_time, run

from loraplex.kernels.lora import (
    LoraBatch,
    LoraCells,
    LoraPlace,
    LoraTable,
    LoraUse,
    add_lora,
    lora_batch,
)
from loraplex.kernels.native.lora import NativeLora

LAYERS = {
    "qkv": (2048, {"q_proj": 2048, "k_proj": 512, "v_proj": 512}),
    "gate_up": (2048, {"gate_proj": 5632, "up_proj": 5632}),
    "down": (5632, {"down_proj": 2048}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    layer: str
    rank: int
    num_adapters: int
    tokens_per_adapter: int

    @property
    def name(self) -> str:
        return (
            f"{self.layer} rank {self.rank} adapters {self.num_adapters} "
            f"tokens of each {self.tokens_per_adapter}"
        )

    @property
    def page_elements(self) -> int:
        in_features, modules = LAYERS[self.layer]
        one = self.rank * (in_features * len(modules) + sum(modules.values()))
        return self.num_adapters * one


CASES = [
    *(Case("qkv", 8, adapters, 1) for adapters in (1, 8, 32)),
    *(Case("qkv", 64, adapters, 1) for adapters in (1, 8, 32)),
    Case("gate_up", 64, 8, 1),
    Case("down", 64, 8, 1),
    Case("qkv", 8, 1, 512),
    Case("qkv", 64, 1, 512),
    Case("down", 16, 4, 128),
]


def make_batch(case: Case, dtype: torch.dtype) -> LoraBatch:
    in_features, modules = LAYERS[case.layer]
    cells = LoraCells([{name: (in_features, size) for name, size in modules.items()}])
    shape = (case.num_adapters, len(cells))
    sizes = np.array([case.rank * sum(pair) for pair in cells.shapes] * case.num_adapters)
    offsets = (np.cumsum(sizes) - sizes).reshape(shape).astype(np.int64)
    ranks = np.full(shape, case.rank, np.int32)
    table = LoraTable(cells, offsets, ranks, np.ones(shape, np.float32))
    uses = [
        LoraUse(0, token % case.num_adapters, token, 1, 1.0)
        for token in range(case.num_adapters * case.tokens_per_adapter)
    ]
    pool = (torch.randn(int(sizes.sum())) / 50).to(dtype)
    return lora_batch(pool, table, uses)


def measure(case: Case, dtype: torch.dtype, native: NativeLora, seconds: float) -> dict[str, Any]:
    in_features, modules = LAYERS[case.layer]
    batch = make_batch(case, dtype)
    num_tokens = case.num_adapters * case.tokens_per_adapter
    x = torch.randn(num_tokens, in_features).to(dtype)
    y = torch.zeros(num_tokens, sum(modules.values()), dtype=dtype)
    out_offsets = tuple(int(first) for first in np.cumsum([0, *modules.values()])[:-1])
    arguments = (y, x, batch, LoraPlace(0, tuple(modules), out_offsets))
    native_time = least_time(lambda: native.add(*arguments), seconds)
    reference_time = least_time(lambda: add_lora(*arguments), seconds)
    times = (native_time, reference_time)
    return figures(
        case.name,
        dtype,
        times,
        case.page_elements,
        2 * case.page_elements * case.tokens_per_adapter,
    )


if __name__ == "__main__":
    run(__doc__, NativeLora, CASES, measure, seconds=0.3)
