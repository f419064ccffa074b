"""Launches of LoRA."""

import functools
from collections.abc import Sequence

import numpy as np
import torch

from loraplex.kernels.adapter_parts import MAX_VECTORS
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import (
    DeviceLoraTable,
    LoraBatch,
    LoraCells,
    LoraPlace,
    LoraSegments,
    LoraTable,
    LoraUse,
    lora_batch,
    lora_segments,
)
from support.kernel_cases import Cases
from support.kernel_cases.llamas import DTYPES, GPU, LLAMA_2_7B, LLAMA_3_1_8B, Llama, empty

_NUM_ENTRIES, _NUM_LAYERS = 64, 32
_POOL_ELEMENTS = 1 << 28
_MAX_RANK = 64
_ALIGNMENT = 1024
"""Slots of a pool for Llamas are multiples of it."""
_FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def cases() -> Cases:
    """What the host makes for a step is made here, where tensors are real."""
    decode, prefill = host_batch([1] * 32), host_batch([700, 1, 1, 600])
    step = functools.partial(_step, LLAMA_3_1_8B, torch.bfloat16)
    made: Cases = {
        "8b bf16 decode": functools.partial(step, decode, _FUSED),
        "8b bf16 decode, one wave": functools.partial(step, host_batch([1] * 32, 1), _FUSED),
        "8b bf16 prefill": functools.partial(step, prefill, _FUSED),
        "7b bf16 decode": functools.partial(_step, LLAMA_2_7B, torch.bfloat16, decode, _FUSED[3:]),
    }
    for kind in ("fp16", "fp32"):
        step = functools.partial(_step, LLAMA_3_1_8B, DTYPES[kind])
        made[f"8b {kind} decode"] = functools.partial(step, decode, _FUSED[:1])
        made[f"8b {kind} prefill"] = functools.partial(step, prefill, _FUSED[:1])
    return made


def host_batch(num_tokens: Sequence[int], num_waves: int = 2) -> tuple[LoraBatch, LoraSegments]:
    """Return a batch of rows with an adapter each; the second wave changes the first row's."""
    firsts = np.cumsum([0, *num_tokens])[:-1].tolist()
    uses = [
        LoraUse(0, row, first, count, 1.0)
        for row, (first, count) in enumerate(zip(firsts, num_tokens, strict=True))
    ]
    if num_waves > 1:
        uses.append(LoraUse(1, len(uses), 0, num_tokens[0], 1.0))
    batch = lora_batch(torch.empty(0), _table(_cells(LLAMA_2_7B)), uses, device=torch.device("cpu"))
    return batch, lora_segments(batch, sum(num_tokens))


def _cells(llama: Llama) -> LoraCells:
    return LoraCells([llama.modules] * _NUM_LAYERS)


def _table(cells: LoraCells, on_device: DeviceLoraTable | None = None) -> LoraTable:
    shape = (_NUM_ENTRIES, len(cells))
    return LoraTable(
        cells,
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        on_device,
        _ALIGNMENT,
        _MAX_RANK,
    )


def device_batch(
    dtype: torch.dtype,
    made: tuple[LoraBatch, LoraSegments],
    cells: LoraCells,
    *,
    has_vectors: bool = False,
) -> LoraBatch:
    """The batch that `host_batch` made, where tensors are fake."""
    host, segments = made
    shape = (_NUM_ENTRIES, len(cells))
    on_device = DeviceLoraTable(
        empty(*shape, dtype=torch.int64),
        empty(*shape, dtype=torch.int32),
        empty(*shape, dtype=torch.float32),
        empty(*shape, MAX_VECTORS, dtype=torch.int32),
    )
    sent = segments.at(empty(len(segments.packed), dtype=torch.int32))
    return LoraBatch(
        empty(_POOL_ELEMENTS, dtype=dtype),
        _table(cells, on_device),
        host.entries,
        host.group_starts,
        host.wave_starts,
        sent.token_indices,
        sent.token_scales,
        segments=sent,
        has_vectors=has_vectors,
    )


def _step(
    llama: Llama,
    dtype: torch.dtype,
    made: tuple[LoraBatch, LoraSegments],
    linears: Sequence[tuple[str, ...]],
) -> None:
    batch = device_batch(dtype, made, _cells(llama), has_vectors=True)
    num_tokens = len(made[1].token_indices) // made[0].num_waves
    kernel = CudaLora(GPU, batch_invariant=False)
    for modules in linears:
        sizes = [llama.modules[module][1] for module in modules]
        offsets = np.cumsum([0, *sizes])[:-1].tolist()
        x = empty(num_tokens, llama.modules[modules[0]][0], dtype=dtype)
        y = empty(num_tokens, sum(sizes), dtype=dtype)
        kernel.add(y, x, batch, LoraPlace(3, modules, tuple(offsets)))
