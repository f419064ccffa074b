"""Part b: Punica's closed loop, S-LoRA's trace for 20 seconds, and its adapters at saturation."""

import msgspec
import torch
from comparison.traces import PunicaTrace, SloraTrace

from gpu.engines import (
    Kind,
    bytes_on_host,
    closed_loop,
    forget,
    make_engine,
    open_loop,
    register,
)
from gpu.journal import CellJournal, Figures
from gpu.models import adapter_bytes, decoder_config
from gpu.rig import Rig, RigSettings, start_seconds
from loraplex.bench.popularity import (
    BaseOnly,
    Distinct,
    Geometric,
    Identical,
    Popularity,
    SquareRoot,
)
from loraplex.bench.report import markdown_table
from loraplex.engine.engine import Engine


class Plan(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    kinds: tuple[tuple[int, str], ...]
    """(rank, modules) of Punica's adapters."""
    punica_requests: int
    punica_longest: int
    concurrency: int
    numbers: tuple[int, ...]
    """Number of adapters in S-LoRA's traces; rank 8 on q, k, v and o, its setting S1."""
    seconds: float
    rate: float
    saturated_requests: int
    saturated_concurrency: int
    longest: int
    """Tokens of a prompt or an output in S-LoRA's traces; not reached."""
    slora_rank: int = 8


FULL = Plan(
    "llama-3.1-8b",
    "bfloat16",
    ((16, "qkv"), (16, "all")),
    256,
    1024,
    32,
    (5, 100, 1000, 2000),
    20.0,
    10.0,
    1000,
    256,
    512,
)
TINY = Plan("tiny", "float32", ((4, "qkv"),), 6, 24, 3, (2, 5), 1.0, 4.0, 6, 3, 12, 4)

POPULARITIES: dict[str, Popularity] = {
    "base": BaseOnly(),
    "distinct": Distinct(),
    "uniform": SquareRoot(),
    "skewed": Geometric(1.5),
    "identical": Identical(),
}
_SLORA_MODULES = "qkvo"


def run(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    if not journal.begins(keys(plan), 2 * start_seconds(device)):
        return
    config = decoder_config(plan.model, plan.dtype)
    itemsize = getattr(torch, plan.dtype).itemsize
    on_device = plan.concurrency * adapter_bytes(config, 16, "all", itemsize) * 2
    longest = max(plan.punica_longest, 2 * plan.longest) + 16
    settings = RigSettings(
        model=plan.model,
        device=device,
        dtype=plan.dtype,
        max_num_seqs=plan.saturated_concurrency,
        max_model_len=longest,
        num_kv_tokens=min(longest * plan.saturated_concurrency, 400_000),
        lora_bytes=max(on_device, 1 << 20),
        max_rank=16,
    )
    rig = Rig(settings)
    engine = make_engine(rig, bytes_on_host(device))
    try:
        _warm(engine, rig, plan)
        _punica(journal, engine, rig, plan)
        _slora(journal, engine, rig, plan)
    finally:
        engine.close()


def keys(plan: Plan) -> list[str]:
    punica = [_punica_key(name, kind) for kind in plan.kinds for name in POPULARITIES]
    slora = [f"s-lora n={n} {how}" for n in plan.numbers for how in ("trace", "saturated")]
    return punica + slora


def _punica_key(name: str, kind: tuple[int, str]) -> str:
    return f"punica {name}" + ("" if name == "base" else f" r{kind[0]} {kind[1]}")


def _warm(engine: Engine, rig: Rig, plan: Plan) -> None:
    """What is compiled or chosen at its first use is not to be in a figure."""
    requests = PunicaTrace(
        popularity=Distinct(),
        num_adapters=plan.concurrency,
        num_requests=plan.concurrency,
        max_model_len=min(64, plan.punica_longest),
    ).generate(1, range(rig.config.vocab_size))
    for rank, modules in (*plan.kinds, (plan.slora_rank, _SLORA_MODULES)):
        digests = register(engine, rig, Kind(rank, modules), plan.concurrency)
        closed_loop(engine, requests, digests, plan.concurrency)
        forget(engine, digests)


def _punica(journal: CellJournal, engine: Engine, rig: Rig, plan: Plan) -> None:
    for kind in plan.kinds:
        for name, popularity in POPULARITIES.items():
            trace = PunicaTrace(
                popularity=popularity,
                num_adapters=plan.punica_requests,
                num_requests=plan.punica_requests,
                concurrency=plan.concurrency,
                max_model_len=plan.punica_longest,
            )

            def work(trace: PunicaTrace = trace, kind: tuple[int, str] = kind) -> Figures:
                requests = trace.generate(0, range(rig.config.vocab_size))
                digests = register(engine, rig, Kind(*kind), plan.punica_requests)
                figures = closed_loop(engine, requests, digests, plan.concurrency)
                forget(engine, digests)
                return figures

            journal.measure(_punica_key(name, kind), work, seconds=60)


def _slora(journal: CellJournal, engine: Engine, rig: Rig, plan: Plan) -> None:
    for number in plan.numbers:
        trace = SloraTrace(
            num_adapters=number,
            requests_per_second=plan.rate,
            seconds=plan.seconds,
            prompt_tokens=(8, plan.longest),
            output_tokens=(8, plan.longest),
        )
        many = msgspec.structs.replace(
            trace, requests_per_second=plan.saturated_requests / plan.seconds
        )

        def work(
            number: int = number, trace: SloraTrace = trace, concurrency: int | None = None
        ) -> Figures:
            requests = trace.generate(0, range(rig.config.vocab_size))
            digests = register(engine, rig, Kind(plan.slora_rank, _SLORA_MODULES), number)
            if concurrency is None:
                figures = open_loop(engine, requests, digests)
            else:
                figures = closed_loop(engine, requests, digests, concurrency)
            forget(engine, digests)
            return figures | {"adapters_used": len({request.adapter for request in requests})}

        journal.measure(f"s-lora n={number} trace", work, seconds=60)
        saturated = lambda many=many, work=work: work(  # noqa: E731
            trace=many, concurrency=plan.saturated_concurrency
        )
        journal.measure(f"s-lora n={number} saturated", saturated, seconds=90)


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    for key in dict.fromkeys(keys(plan)):
        cell = journal.cells.get(key)
        if cell is None or cell.missing:
            continue
        found, base = cell.figures, _base_of(journal, key, plan)
        rows.append(
            (
                key,
                f"{found['tokens_per_second']:.0f}",
                f"{found['requests_per_second']:.2f}",
                f"{found['first_token_p50']:.3f} / {found['first_token_p99']:.3f}",
                "" if base is None else f"{found['tokens_per_second'] / base:.3f}",
            )
        )
    head = ("case", "tok/s", "req/s", "TTFT p50 / p99 s", "tok/s to base or n least")
    return markdown_table(head, rows)


def _base_of(journal: CellJournal, key: str, plan: Plan) -> float | None:
    how = key.rsplit(" ", 1)[-1]
    base = "punica base" if key.startswith("punica") else f"s-lora n={plan.numbers[0]} {how}"
    cell = journal.cells.get(base)
    return cell.figures.get("tokens_per_second") if cell and how != "trace" else None
