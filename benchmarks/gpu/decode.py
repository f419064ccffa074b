"""Part a: a step of decoding, by batch, adapters, rank and modules, against its byte floor."""

import itertools
import statistics
from collections.abc import Iterator

import msgspec
import torch

from gpu.card import copy_bandwidth
from gpu.journal import CellJournal, Figures
from gpu.models import adapter_bytes, decoder_config, kv_bytes, step_bytes
from gpu.rig import Rig, RigSettings, start_seconds
from loraplex.bench.report import markdown_table

_BLOCKS = 5
_MODULES = ("qkv", "all")
_SHARE_OF_STEPS = 12
"""One part in so many of the memory is left for steps, recorded steps and embeddings."""


class Case(msgspec.Struct, frozen=True):
    model: str
    batch: int
    adapters: str
    """none, one or distinct."""
    rank: int = 0
    modules: str = ""

    @property
    def key(self) -> str:
        lora = f" r{self.rank} {self.modules}" if self.rank else ""
        return f"{self.model} b{self.batch} {self.adapters}{lora}"

    @property
    def base(self) -> "Case":
        return Case(self.model, self.batch, "none")


class Plan(msgspec.Struct, frozen=True):
    models: tuple[str, ...]
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    context: int
    steps: int
    """Steps of one block; a figure is the median of some blocks."""
    dtype: str


FULL = Plan(
    ("llama-3.1-8b", "llama-2-7b"), (1, 8, 32, 64, 128, 256), (8, 16, 64), 1024, 20, "bfloat16"
)
TINY = Plan(("tiny",), (1, 3), (4, 8), 32, 2, "float32")


def keys(plan: Plan) -> list[str]:
    return ["copy", *(case.key for model in plan.models for case in cases(plan, model))]


def cases(plan: Plan, model: str) -> Iterator[Case]:
    """Those of one kind of adapter together: they are copied to the device once."""
    for batch in plan.batches:
        yield Case(model, batch, "none")
    for rank, modules in itertools.product(plan.ranks, _MODULES):
        for batch, adapters in itertools.product(plan.batches, ("one", "distinct")):
            yield Case(model, batch, adapters, rank, modules)


def run(
    journal: CellJournal, device: torch.device, plan: Plan, pool_bytes: int | None = None
) -> None:
    journal.measure("copy", lambda: {"bytes_per_second": copy_bandwidth(device)})
    for model in plan.models:
        wanted = [case for case in cases(plan, model) if case.key not in journal.cells]
        if journal.begins([case.key for case in wanted], start_seconds(device)):
            _run_model(journal, device, plan, wanted, pool_bytes)


def _run_model(
    journal: CellJournal,
    device: torch.device,
    plan: Plan,
    wanted: list[Case],
    pool_bytes: int | None,
) -> None:
    rig = make_rig(device, plan, wanted[0].model, max(case.batch for case in wanted), pool_bytes)
    try:
        for (rank, modules), group in itertools.groupby(wanted, lambda c: (c.rank, c.modules)):
            kind = list(group)
            count = max(case.batch for case in kind) if rank else 0
            handles = (
                rig.load(min(count, rig.most_adapters(rank, modules)), rank, modules)
                if rank
                else []
            )
            for case in kind:
                measure_case(journal, rig, plan, case, handles)
    finally:
        rig.close()


def make_rig(
    device: torch.device, plan: Plan, model: str, largest: int, pool_bytes: int | None = None
) -> Rig:
    """Return the number of sequences that fit next to weights and adapters."""
    config = decoder_config(model, plan.dtype)
    itemsize = getattr(torch, plan.dtype).itemsize
    longest = plan.context + (1 + _BLOCKS) * plan.steps + 16
    tokens = largest * longest
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        left = free - step_bytes(config, itemsize) - free // _SHARE_OF_STEPS
        tokens = min(tokens, int(0.6 * left) // kv_bytes(config, itemsize))
        pool = left - tokens * kv_bytes(config, itemsize)
        wanted = largest * adapter_bytes(config, max(plan.ranks), "all", itemsize) * 5 // 4
        pool_bytes = min(pool, max(wanted, 1 << 30))
    settings = RigSettings(
        model=model,
        device=device,
        dtype=plan.dtype,
        max_num_seqs=largest,
        max_model_len=longest,
        num_kv_tokens=tokens,
        lora_bytes=pool_bytes or 1 << 22,
        max_rank=max(plan.ranks),
    )
    return Rig(settings)


def measure_case(
    journal: CellJournal, rig: Rig, plan: Plan, case: Case, handles: list[int]
) -> None:
    blocks = -(-(plan.context + (1 + _BLOCKS) * plan.steps) // 16)
    needed = {"none": 0, "one": 1, "distinct": case.batch}[case.adapters]
    bandwidth = journal.cells["copy"].figures["bytes_per_second"]

    def work() -> Figures:
        if case.batch * blocks > rig.runner.capacity().cache_groups[0].num_blocks:
            raise MemoryError("its keys and values do not fit")
        if needed > len(handles):
            raise MemoryError("its adapters do not fit")
        seconds = rig.decode(case.batch, plan.context, handles[:needed], _BLOCKS, plan.steps)
        step = statistics.median(seconds)
        floor = floor_bytes(rig, plan, case) / bandwidth
        return {
            "step_ms": 1e3 * step,
            "least_ms": 1e3 * min(seconds),
            "most_ms": 1e3 * max(seconds),
            "tokens_per_second": case.batch / step,
            "floor_ms": 1e3 * floor,
            "share_of_floor": floor / step,
        }

    journal.measure(case.key, work, seconds=10)


def floor_bytes(rig: Rig, plan: Plan, case: Case) -> int:
    """That a step must read: weights once, each row's keys and values, each adapter once."""
    itemsize = rig.itemsize
    context = plan.context + (1 + _BLOCKS) * plan.steps // 2
    total = step_bytes(rig.config, itemsize) + case.batch * context * kv_bytes(rig.config, itemsize)
    count = {"none": 0, "one": 1, "distinct": case.batch}[case.adapters]
    if count:
        total += count * adapter_bytes(rig.config, case.rank, case.modules, itemsize)
    return total


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    for model in plan.models:
        for case in cases(plan, model):
            cell = journal.cells.get(case.key)
            if cell is None:
                continue
            if cell.missing:
                rows.append((case.key, cell.missing, "", "", "", ""))
                continue
            found, base = cell.figures, journal.cells.get(case.base.key)
            ratio = (
                found["step_ms"] / base.figures["step_ms"] if base and not base.missing else None
            )
            rows.append(
                (
                    case.key,
                    f"{found['step_ms']:.3f}",
                    f"{found['tokens_per_second']:.0f}",
                    f"{found['floor_ms']:.3f}",
                    f"{found['share_of_floor']:.0%}",
                    "" if ratio is None or not case.rank else f"{ratio:.3f}",
                )
            )
    head = ("case", "step ms", "tok/s", "floor ms", "of floor", "to no LoRA")
    return markdown_table(head, rows)
