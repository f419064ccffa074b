"""Part e: tokens of prompts a second, in steps of whole prompts."""

import functools
import statistics
from collections.abc import Sequence

import msgspec
import torch

from gpu.journal import Cell, CellJournal, Figures
from gpu.models import adapter_bytes, decoder_config, step_bytes
from gpu.rig import Rig, RigSettings, start_seconds
from loraplex.bench.report import markdown_table
from loraplex.core.adapter import AdapterHandle

_REPEATS = 5


class Plan(msgspec.Struct, frozen=True):
    models: tuple[str, ...]
    dtype: str
    prompts: tuple[tuple[int, int], ...]
    """(number, tokens of each) in one step."""
    kinds: tuple[tuple[int, str], ...]


FULL = Plan(
    ("llama-3.1-8b", "llama-2-7b"),
    "bfloat16",
    ((1, 128), (1, 512), (1, 2048), (8, 256), (1, 8192), (16, 512)),
    ((16, "qkv"), (16, "all"), (64, "all")),
)
TINY = Plan(("tiny",), "float32", ((1, 8), (2, 8)), ((4, "all"),))


def keys(plan: Plan) -> list[str]:
    return [key for model in plan.models for key, _, _ in _keys(plan, model)]


def _keys(plan: Plan, model: str) -> list[tuple[str, tuple[int, int], tuple[int, str] | None]]:
    found: list[tuple[str, tuple[int, int], tuple[int, str] | None]] = []
    for kind in (None, *plan.kinds):
        for number, length in plan.prompts:
            lora = "none" if kind is None else f"distinct r{kind[0]} {kind[1]}"
            found.append((f"{model} {number}x{length} {lora}", (number, length), kind))
    return found


def run(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    for model in plan.models:
        wanted = [key for key, _, _ in _keys(plan, model)]
        if not journal.begins(wanted, start_seconds(device)):
            continue
        rig = Rig(_settings(device, plan, model))
        try:
            _run_model(journal, rig, plan, model)
        finally:
            rig.close()


def _settings(device: torch.device, plan: Plan, model: str) -> RigSettings:
    most = max(number for number, _ in plan.prompts)
    longest = max(number * length for number, length in plan.prompts)
    rank = max(rank for rank, _ in plan.kinds)
    config, itemsize = decoder_config(model, plan.dtype), getattr(torch, plan.dtype).itemsize
    pool = most * adapter_bytes(config, rank, "all", itemsize) * 5 // 4
    return RigSettings(
        model=model,
        device=device,
        dtype=plan.dtype,
        max_num_seqs=most,
        max_model_len=min(longest + 16, config.max_position_embeddings),
        num_kv_tokens=longest + 16 * most,
        lora_bytes=max(pool, 1 << 20),
        max_num_batched_tokens=longest,
        max_rank=rank,
    )


def _run_model(journal: CellJournal, rig: Rig, plan: Plan, model: str) -> None:
    loaded: tuple[int, str] | None = None
    handles: list[int] = []
    most = max(number for number, _ in plan.prompts)
    for key, (number, length), kind in _keys(plan, model):
        if length > rig.runner.capacity().max_model_len:
            journal.add(Cell(key=key, missing="longer than the model's maximum"))
            continue
        if kind is not None and kind != loaded:
            loaded, handles = kind, rig.load(most, *kind)

        wanted = handles[:number] if kind is not None else []
        work = functools.partial(step, rig, number, length, wanted)
        journal.measure(key, work, seconds=15)


def step(rig: Rig, number: int, length: int, handles: Sequence[AdapterHandle]) -> Figures:
    rig.prefill([length] * number, handles)
    seconds = [rig.prefill([length] * number, handles) for _ in range(_REPEATS)]
    median = statistics.median(seconds)
    flops = 2 * step_bytes(rig.config, 1) * number * length
    return {
        "step_ms": 1e3 * median,
        "tokens_per_second": number * length / median,
        "linear_tflops": flops / median / 1e12,
    }


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    for model in plan.models:
        for key, (number, length), kind in _keys(plan, model):
            cell = journal.cells.get(key)
            if cell is None or cell.missing:
                continue
            base = journal.cells.get(f"{model} {number}x{length} none")
            found = cell.figures
            has_base = base is not None and not base.missing and kind is not None
            ratio = found["step_ms"] / base.figures["step_ms"] if base and has_base else None
            rows.append(
                (
                    key,
                    f"{found['step_ms']:.2f}",
                    f"{found['tokens_per_second']:.0f}",
                    f"{found['linear_tflops']:.1f}",
                    "" if ratio is None else f"{ratio:.3f}",
                )
            )
    return markdown_table(("case", "step ms", "tok/s", "TFLOP/s of linears", "to no LoRA"), rows)
