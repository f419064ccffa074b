r"""What the batch manager's choices are worth, on one workload, in one run.

    PYTHONPATH=tests python benchmarks/batching.py [--repeats 3] \
        [--output benchmarks/results/batching]

The workload is W4 of `compare.py`: 64 requests at once over 32 adapters, 32 to 256
tokens in and 16 to 128 out, on the random Llama `tiny`, in bfloat16, 16 sequences at most. One
engine runs in this thread; every variant gets a fresh one in every repeat, and the variants take
turns in another order each time. A ratio is that of the same repeat.

`static` is TensorRT-LLM's V1: a batch is formed, runs to its end, then the next. The original pads:
prompts to the longest of the batch, and rows that have ended are computed until the last one has;
`static, padded` does so by requesting it, and its requests complete when their batch ends.
Tokens are counted as requested, without padding. The variants but that one must give the very same
tokens, or nothing is written. With the system prompt the cache fits it under every adapter: KV
is never shared between adapters, so of the two requests of each one finds it.
"""

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from comparison.cases import NUM_ADAPTERS
from comparison.fixtures import Fixture
from comparison.shapes import find_shape
from step import MODULES, RANK, random_adapter
from tqdm import tqdm

from loraplex.bench.arrivals import Burst
from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.popularity import Distinct
from loraplex.bench.report import markdown_table, write_pair
from loraplex.bench.statistics import Ratio, percentile
from loraplex.bench.workload import Lengths, PlannedRequest, Workload, generate
from loraplex.core.adapter import AdapterSource, AdapterUse, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.environment import cache_directory
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import Batching, BatchSchedulerPolicy, SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.models.registry import read_config
from support.instant_loader import InstantLoader

MAX_NUM_SEQS = 16
SYSTEM_PROMPT_TOKENS = 1000
CACHE_TOKENS = 8192
"""KV blocks: enough for all that runs."""
SCARCE_TOKENS = 2560
"""Less than what runs comes to need."""
PLAIN = SchedulerSettings()


@dataclasses.dataclass(frozen=True)
class Variant:
    name: str
    scheduling: SchedulerSettings = PLAIN
    num_kv_tokens: int = CACHE_TOKENS
    host_kv_bytes: int = 0
    overlaps: bool = False
    is_padded: bool = False
    has_system_prompt: bool = False


def variants() -> list[Variant]:
    static = SchedulerSettings(batching=Batching.STATIC)
    no_evict = SchedulerSettings(batch_scheduler_policy=BatchSchedulerPolicy.GUARANTEED_NO_EVICT)
    no_reuse = SchedulerSettings(enable_prefix_cache=False)
    scarce = SCARCE_TOKENS
    long = CACHE_TOKENS + (MAX_NUM_SEQS + NUM_ADAPTERS) * SYSTEM_PROMPT_TOKENS
    return [
        Variant("in flight"),
        Variant("static", static),
        Variant("static, padded", static, is_padded=True),
        Variant("in flight, overlap", overlaps=True),
        Variant("scarce KV, max utilization", num_kv_tokens=scarce),
        Variant("scarce KV, and host offload", num_kv_tokens=scarce, host_kv_bytes=1 << 30),
        Variant("scarce KV, no evict", no_evict, scarce),
        Variant("system prompt, reuse", num_kv_tokens=long, has_system_prompt=True),
        Variant("system prompt, no reuse", no_reuse, long, has_system_prompt=True),
    ]


COMPARISONS = (
    ("in flight", "static"),
    ("in flight", "static, padded"),
    ("in flight, overlap", "in flight"),
    ("scarce KV, max utilization", "scarce KV, no evict"),
    ("scarce KV, and host offload", "scarce KV, max utilization"),
    ("system prompt, reuse", "system prompt, no reuse"),
)


class Run(msgspec.Struct, frozen=True):
    """One variant in one repeat. Latencies are in seconds from the start."""

    tokens_per_second: float
    mean_latency: float
    first_token_p50: float
    first_token_p99: float
    preemptions: int
    cached_share: float
    """Range of the prompt tokens."""


class Measured(msgspec.Struct, frozen=True):
    name: str
    runs: tuple[Run, ...]


class Compared(msgspec.Struct, frozen=True):
    """Output tokens per second of one variant over another's, and mean latency likewise."""

    name: str
    base: str
    throughput: Ratio
    mean_latency: Ratio


class BatchingReport(msgspec.Struct, frozen=True):
    created: str
    code: Code
    machine: Machine
    variants: tuple[Measured, ...]
    comparisons: tuple[Compared, ...]


class Subject:
    """The model, and what its adapters change."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self.config = read_config(folder)
        torch.set_num_threads(threads)
        self._targets = tuple(
            LoraTarget(layer, module, RANK, *shapes[module])
            for layer, shapes in enumerate(self.config.module_shapes)
            for module in MODULES
            if module in shapes
        )

    def engine(self, variant: Variant) -> Engine:
        """Fresh, with every adapter known and on the device."""
        host = HostAdapters()
        settings = RunnerSettings(
            dtype="bfloat16",
            max_num_seqs=MAX_NUM_SEQS,
            max_tokens_in_paged_kv_cache=variant.num_kv_tokens,
            kv_cache_host_memory_bytes=variant.host_kv_bytes,
        )
        runner = load_runner(self.folder, settings, host)
        torch.manual_seed(0)
        loader = InstantLoader(host, lambda source: random_adapter(source, torch.bfloat16))
        engine = build_engine(
            ThreadedRunner(runner) if variant.overlaps else runner,
            loader,
            SystemClock(),
            variant.scheduling,
            adapter_host_bytes=1 << 30,
            overlap=variant.overlaps,
        )
        for number in range(NUM_ADAPTERS):
            digest = f"adapter {number}"
            engine.register_adapter(AdapterSource(digest, "", 1 << 20, self._targets))
            engine.preload(digest)
        while not engine.is_idle:
            engine.step()
        return engine


def requests_of(variant: Variant, repeat: int, vocabulary: Sequence[int]) -> list[PlannedRequest]:
    load = Workload(
        num_requests=64,
        prompt_tokens=Lengths(32, 256),
        output_tokens=Lengths(16, 128),
        popularity=Distinct(),
        num_adapters=NUM_ADAPTERS,
        arrivals=Burst(),
        seed=0,
    )
    requests = generate(load, repeat, vocabulary)
    if variant.has_system_prompt:
        system = random.Random(repeat).choices(vocabulary, k=SYSTEM_PROMPT_TOKENS)
        requests = [
            msgspec.structs.replace(r, prompt_token_ids=(*system, *r.prompt_token_ids))
            for r in requests
        ]
    return padded(requests) if variant.is_padded else requests


def padded(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Batch by batch, all requests have the longest prompt and the longest output."""
    result = []
    for first in range(0, len(requests), MAX_NUM_SEQS):
        batch = requests[first : first + MAX_NUM_SEQS]
        longest = max(len(request.prompt_token_ids) for request in batch)
        num_outputs = max(request.num_output_tokens for request in batch)
        for request in batch:
            prompt = request.prompt_token_ids
            padding = (prompt[0],) * (longest - len(prompt))
            changed = {"prompt_token_ids": padding + prompt, "num_output_tokens": num_outputs}
            result.append(msgspec.structs.replace(request, **changed))
    return result


class Outputs:
    """What came back, and when: by request, in seconds from the start."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def take(self, engine: Engine, start: float) -> None:
        """One step."""
        outputs, now = engine.step().outputs, None
        for output in outputs:
            assert output.error is None, output.error
            now = now or time.perf_counter() - start
            for delta in output.deltas:
                self.tokens.setdefault(output.request_id, []).extend(delta.token_ids)
                self.first.setdefault(output.request_id, now)
            if output.finished:
                self.ended[output.request_id] = now

    def as_padded(self) -> None:
        """Complete a whole batch at once, as the original does."""
        for first in range(0, len(self.ended), MAX_NUM_SEQS):
            batch = range(first, min(first + MAX_NUM_SEQS, len(self.ended)))
            end = max(self.ended[number] for number in batch)
            self.ended.update(dict.fromkeys(batch, end))


def run(
    subject: Subject, variant: Variant, repeat: int, vocabulary: Sequence[int]
) -> tuple[Run, Outputs]:
    engine = subject.engine(variant)
    before = engine.stats()
    for number, request in enumerate(requests_of(variant, repeat, vocabulary)):
        engine.add(_engine_request(number, request))
    outputs, start = Outputs(), time.perf_counter()
    while not engine.is_idle:
        outputs.take(engine, start)
    seconds, stats = time.perf_counter() - start, engine.stats()
    engine.close()
    if variant.is_padded:
        outputs.as_padded()
    plain = requests_of(dataclasses.replace(variant, is_padded=False), repeat, vocabulary)
    num_prompt_tokens = stats.prompt_tokens - before.prompt_tokens
    result = Run(
        tokens_per_second=sum(request.num_output_tokens for request in plain) / seconds,
        mean_latency=statistics.mean(outputs.ended.values()),
        first_token_p50=percentile(sorted(outputs.first.values()), 50),
        first_token_p99=percentile(sorted(outputs.first.values()), 99),
        preemptions=stats.preemptions,
        cached_share=stats.cached_tokens / num_prompt_tokens,
    )
    return result, outputs


def _engine_request(number: int, request: PlannedRequest) -> EngineRequest:
    digest = f"adapter {request.adapter}"
    return EngineRequest(
        request_id=number,
        prompt_token_ids=request.prompt_token_ids,
        task=Generate(
            SamplingParams(
                temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True, seed=0
            )
        ),
        eos_token_ids=(),
        adapters=(AdapterUse(digest),),
        kv_salt=digest.encode(),
        tenant="",
        priority=0,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
    )


def measure(subject: Subject, repeats: int, vocabulary: Sequence[int]) -> tuple[Measured, ...]:
    runs: dict[str, list[Run]] = {variant.name: [] for variant in variants()}
    order = random.Random(0)
    with tqdm(total=(1 + repeats) * len(runs), unit="run", disable=None) as bar:
        for repeat in range(1 + repeats):
            turn = order.sample(variants(), len(runs))
            said: dict[bool, dict[int, list[int]]] = {}
            for variant in turn:
                bar.set_description(variant.name)
                result, outputs = run(subject, variant, repeat, vocabulary)
                if repeat:  # the first warms caches up
                    runs[variant.name].append(result)
                if not variant.is_padded:
                    expected = said.setdefault(variant.has_system_prompt, outputs.tokens)
                    assert outputs.tokens == expected, f"{variant.name}: other tokens"
                bar.update()
    return tuple(Measured(name, tuple(of_variant)) for name, of_variant in runs.items())


def compare(measured: Iterable[Measured]) -> tuple[Compared, ...]:
    runs = {each.name: each.runs for each in measured}

    def ratio(name: str, base: str, field: str) -> Ratio:
        pairs = zip(runs[name], runs[base], strict=True)
        ratios = [getattr(one, field) / getattr(other, field) for one, other in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    return tuple(
        Compared(
            name,
            base,
            ratio(name, base, "tokens_per_second"),
            ratio(name, base, "mean_latency"),
        )
        for name, base in COMPARISONS
    )


def markdown(report: BatchingReport) -> str:
    def median(measured: Measured, field: str) -> float:
        return float(statistics.median(getattr(run, field) for run in measured.runs))

    rows = [
        (
            each.name,
            f"{median(each, 'tokens_per_second'):.0f}",
            f"{median(each, 'mean_latency'):.2f}",
            f"{median(each, 'first_token_p50'):.2f} / {median(each, 'first_token_p99'):.2f}",
            f"{median(each, 'preemptions'):.0f}",
            f"{median(each, 'cached_share'):.0%}",
        )
        for each in report.variants
    ]
    columns = ("variant", "tok/s", "mean latency s", "TTFT p50 / p99 s", "preempted", "cached")
    ratios = [
        (each.name, each.base, _ratio(each.throughput), _ratio(each.mean_latency))
        for each in report.comparisons
    ]
    heads = ("variant", "to", "tok/s", "mean latency")
    repeats = len(report.variants[0].runs)
    lines = [
        "# What the batch manager's choices are worth",
        "",
        "64 requests at once over 32 adapters, 32 to 256 tokens in, 16 to 128 out, model `tiny`,",
        f"bfloat16, {MAX_NUM_SEQS} sequences at most; medians of {repeats} repeats in one run.",
        "",
        *machine_lines(report.created, report.code, report.machine),
        "",
        markdown_table(columns, rows),
        "",
        "Ratios of the same repeat: the median (lowest to highest).",
        "",
        markdown_table(heads, ratios),
        "",
    ]
    return "\n".join(lines)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/batching"))
    arguments = parser.parse_args()
    fixture = Fixture(find_shape("tiny"), cache_directory() / "bench")
    fixture.ensure_model()
    subject = Subject(fixture.model, arguments.threads)
    measured = measure(subject, arguments.repeats, fixture.vocabulary)
    report = BatchingReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        code=this_code(),
        machine=this_machine(),
        variants=measured,
        comparisons=compare(measured),
    )
    write_pair(report, markdown(report), arguments.output.with_suffix(".json"))
    print(markdown(report))


if __name__ == "__main__":
    main()
