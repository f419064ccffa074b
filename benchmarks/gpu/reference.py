"""Part c: the same requests by transformers and peft, and by loraplex, in one run.

peft serves them in the two ways that it has: one batch whose rows have adapters of their own
(`adapter_names`), and one request after another with its adapter switched on. Its own best is what
loraplex is compared with.
"""

import functools
import gc
import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from gpu.card import seconds_of
from gpu.engines import Kind, bytes_on_host, closed_loop, forget, make_engine, register
from gpu.journal import CellJournal, Figures
from gpu.models import MODULES, adapter_bytes, decoder_config, hf_config
from gpu.rig import Rig, RigSettings, start_seconds
from loraplex.bench.report import markdown_table
from loraplex.bench.workload import PlannedRequest

_REPEATS = 3
_PEFT_SECONDS = 45.0


class Plan(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    kinds: tuple[tuple[int, str], ...]
    batch: int
    prompt_tokens: int
    output_tokens: int
    alone: int
    """Requests that peft runs one after another, up to the time limit."""


FULL = Plan("llama-3.1-8b", "bfloat16", ((16, "qkv"), (16, "all")), 32, 128, 64, 4)
TINY = Plan("tiny", "float32", ((4, "qkv"),), 3, 8, 4, 2)


def requests_of(plan: Plan, repeat: int, vocab_size: int, with_lora: bool) -> list[PlannedRequest]:
    draws = random.Random(repeat)
    return [
        PlannedRequest(
            prompt_token_ids=tuple(draws.choices(range(vocab_size), k=plan.prompt_tokens)),
            num_output_tokens=plan.output_tokens,
            adapter=number if with_lora else None,
            due_seconds=0.0,
        )
        for number in range(plan.batch)
    ]


def run(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    if journal.begins(our_keys(plan), start_seconds(device)):
        run_ours(journal, device, plan)
    release(device)
    if journal.begins(_their_keys(plan), _PEFT_SECONDS if device.type == "cuda" else 0.0):
        _run_theirs(journal, device, plan)


def release(device: torch.device) -> None:
    """Give the memory of what ended back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keys(plan: Plan) -> list[str]:
    return our_keys(plan) + _their_keys(plan)


def our_keys(plan: Plan) -> list[str]:
    return [f"loraplex {name}" for name in names(plan)]


def _their_keys(plan: Plan) -> list[str]:
    return [f"peft {name}{how}" for name in names(plan) for how in ("", " one by one")]


def names(plan: Plan) -> list[str]:
    return ["base", *(f"distinct r{rank} {modules}" for rank, modules in plan.kinds)]


def run_ours(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    config, itemsize = decoder_config(plan.model, plan.dtype), getattr(torch, plan.dtype).itemsize
    rank = max(rank for rank, _ in plan.kinds)
    longest = plan.prompt_tokens + plan.output_tokens + 16
    pool = plan.batch * adapter_bytes(config, rank, "all", itemsize) * 5 // 4
    rig = Rig(
        RigSettings(
            model=plan.model,
            device=device,
            dtype=plan.dtype,
            max_num_seqs=plan.batch,
            max_model_len=longest,
            num_kv_tokens=plan.batch * longest,
            lora_bytes=max(pool, 1 << 20),
            max_rank=rank,
        )
    )
    engine = make_engine(rig, bytes_on_host(device))
    vocab = rig.config.vocab_size
    try:
        for name, kind in zip(names(plan), (None, *plan.kinds), strict=True):
            digests = [] if kind is None else register(engine, rig, Kind(*kind), plan.batch)

            def work(kind: Any = kind, digests: list[str] = digests) -> Figures:
                runs = [
                    closed_loop(
                        engine, requests_of(plan, repeat, vocab, bool(kind)), digests, plan.batch
                    )["seconds"]
                    for repeat in range(1 + _REPEATS)
                ]
                return figures_of(plan, runs[1:], plan.batch)

            journal.measure(f"loraplex {name}", work, seconds=30)
            forget(engine, digests)
    finally:
        engine.close()


def figures_of(plan: Plan, seconds: list[float], count: int) -> Figures:
    median = statistics.median(seconds)
    tokens = count * plan.output_tokens
    return {"seconds": median, "tokens_per_second": tokens / median}


def _run_theirs(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

    fields = hf_config(plan.model, plan.dtype) | {"attn_implementation": "sdpa"}
    config = LlamaConfig(**fields)
    torch.manual_seed(0)
    with torch.device(device):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, plan.dtype)).eval()
    for name, kind in zip(names(plan), (None, *plan.kinds), strict=True):
        adapted = model if kind is None else _with_adapters(model, plan, *kind)
        adapters = [] if kind is None else [f"a{number}" for number in range(plan.batch)]
        mixed = functools.partial(_time, _mixed(adapted, device, plan, adapters), device, plan)
        journal.measure(f"peft {name}", mixed, 60)
        alone = functools.partial(
            _time, _one_by_one(adapted, device, plan, adapters), device, plan, 1
        )
        journal.measure(f"peft {name} one by one", alone, 60)
        if kind is not None:
            model = adapted.unload()


def _with_adapters(model: Any, plan: Plan, rank: int, modules: str) -> Any:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=list(MODULES[modules]),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config, adapter_name="a0", autocast_adapter_dtype=False)
    for number in range(1, plan.batch):
        adapted.add_adapter(f"a{number}", config)
    return adapted.to(dtype=getattr(torch, plan.dtype)).eval()


def _mixed(model: Any, device: torch.device, plan: Plan, names: list[str]) -> Callable[[], int]:
    prompts = _prompts(plan, device)
    adapted = {"adapter_names": names} if names else {}

    def work() -> int:
        _generate(model, prompts, plan, adapted)
        return plan.batch

    return work


def _one_by_one(
    model: Any, device: torch.device, plan: Plan, names: list[str]
) -> Callable[[], int]:
    prompts = _prompts(plan, device)

    def work() -> int:
        for number in range(plan.alone):
            if names:
                model.set_adapter(names[number])
            _generate(model, prompts[number : number + 1], plan, {})
        return plan.alone

    return work


def _prompts(plan: Plan, device: torch.device) -> torch.Tensor:
    vocab = decoder_config(plan.model, plan.dtype).vocab_size
    requests = requests_of(plan, 0, vocab, with_lora=False)
    return torch.tensor([request.prompt_token_ids for request in requests], device=device)


@torch.inference_mode()
def _generate(model: Any, prompts: torch.Tensor, plan: Plan, adapted: dict[str, Any]) -> None:
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=plan.output_tokens,
        min_new_tokens=plan.output_tokens,
        pad_token_id=0,
        **adapted,
    )


def _time(
    work: Callable[[], int], device: torch.device, plan: Plan, repeats: int = _REPEATS
) -> Figures:
    """Time `work`, which returns the number of its completed requests."""
    counts: list[int] = []
    seconds = seconds_of(lambda: counts.append(work()), device, repeats)
    return figures_of(plan, seconds, counts[-1])


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    for name in names(plan):
        ours = journal.cells.get(f"loraplex {name}")
        theirs = [journal.cells.get(f"peft {name}{how}") for how in ("", " one by one")]
        speeds = [
            cell.figures.get("tokens_per_second") if cell else None for cell in (ours, *theirs)
        ]
        best = max((speed for speed in speeds[1:] if speed), default=None)
        ratio = speeds[0] / best if speeds[0] and best else None
        cells = ["" if speed is None else f"{speed:.0f}" for speed in speeds]
        rows.append((name, *cells, "" if ratio is None else f"{ratio:.1f}"))
    head = ("adapters", "loraplex tok/s", "peft, mixed batch", "peft, one by one", "to its best")
    return markdown_table(head, rows)
