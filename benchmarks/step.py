r"""Where the time of a decoding step goes: native kernels, scheduler, and the Python in between.

    PYTHONPATH=tests python benchmarks/step.py MODEL [--batches 1 8 32] [--dtype bfloat16] \
        [--quantization int8] [--context 256] [--threads 2] [--json] [--compare BASELINE]

MODEL is a folder of a Llama, such as the fixtures of comparison.fixtures, or its GGUF file; or
NAME:TYPE for a shape of comparison.shapes as a GGUF file of random weights, which is written once
(--fixtures): llama-3.1-8b:Q4_K_M. One engine runs in this thread, every row with an adapter of its
own (rank 8 on q, k and v), contexts of about 256 tokens, greedy. A prompt of as many tokens, alone,
comes first. A section's time is its own, without that of the sections inside it, and the least of
all steps: the machine is shared. What a C call costs before it reaches C counts as Python, and so
does what torch computes.

The floor is that of the model, not of a kernel: max(bytes of the linear layers as they are held /
bandwidth, flops / peak) + (KV bytes + adapter bytes) / bandwidth, by the limits that
machine_limits.py measures; of a prompt, its flops / peak, attention included. The peak is that of
float32, which processors with products of pairs or bytes surpass.

BASELINE is what --json printed before, or a folder, in which that of the same model, settings and
kind of processor is looked for. A row whose best share of the floor is more than the tolerance
below that of the baseline is named, and the program ends with 1.
"""

import argparse
import ctypes
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from comparison.fixtures import Fixture
from comparison.shapes import find_shape
from machine_limits import MachineLimits, measure_limits

from loraplex.bench.machine import this_code, this_machine
from loraplex.core.adapter import AdapterSource, AdapterUse, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.environment import cache_directory
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.core.weight_precision import WeightPrecision
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.weights.gguf_folder import SUFFIX, gguf_folder
from loraplex.kernels.native.library import NativeLibrary
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from support.instant_loader import InstantLoader

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj")
QUICK_SECONDS = 2.0
"""A prompt that takes less is measured again, and its least time counts."""
NATIVE = "native"
_SETTINGS = ("model", "dtype", "quantization", "context", "threads", "vector_bytes")
"""What two reports must have in common to be compared."""


class Ledger:
    """Seconds of each section of a step, without those of the sections inside it."""

    def __init__(self) -> None:
        self.is_open = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._sections: list[str] = []
        self._since = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Notes what happens inside; what is in no section is called "engine"."""
        self.seconds.clear()
        self._sections, self._since = ["engine"], time.perf_counter()
        self.is_open = True
        yield
        self.is_open = False
        self._charge()

    def section(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if not self.is_open:
                return function(*arguments)
            self._charge()
            self._sections.append(name)
            try:
                return function(*arguments)
            finally:
                self._charge()
                self._sections.pop()

        return timed

    def native(self, function: Callable[..., Any], types: Sequence[Any]) -> Callable[..., Any]:
        """A C function; what its call costs in Python goes to the section that calls it."""
        timed = self.section(NATIVE, function)
        empty = _empty_function(types)
        costs: list[float] = []

        def called(*arguments: Any) -> Any:
            if self.is_open:
                if not costs:
                    costs.append(_least_seconds(empty, arguments))
                self._move(costs[0])
            return timed(*arguments)

        return called

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._sections[-1]] += now - self._since
        self._since = now

    def _move(self, seconds: float) -> None:
        self.seconds[self._sections[-1]] += seconds
        self.seconds[NATIVE] -= seconds


def _empty_function(argument_types: Sequence[Any]) -> Callable[..., Any]:
    """Takes such arguments, and does nothing: compares the first two of them."""
    function: Any = ctypes.CDLL(None)["pthread_equal"]
    function.argtypes = argument_types
    function.restype = ctypes.c_int32
    function.errcheck = _accept
    return function  # type: ignore[no-any-return]


def _accept(_status: int, _function: Any, _arguments: tuple[Any, ...]) -> None:
    """Implements the check of a status, which every call has."""


def _least_seconds(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def random_adapter(source: AdapterSource, dtype: torch.dtype) -> HostAdapter:
    weights = tuple(
        HostWeight(
            target,
            (torch.randn(target.rank, target.in_features) / 100).to(dtype),
            (torch.randn(target.out_features, target.rank) / 100).to(dtype),
            1.0,
        )
        for target in source.targets
    )
    return HostAdapter(source.digest, weights)


@dataclasses.dataclass(frozen=True)
class Subject:
    engine: Engine
    config: ModelSpec
    ledger: Ledger
    linear_bytes: int
    itemsize: int  # of keys, values and adapters
    context: int


def make_subject(folder: Path, arguments: argparse.Namespace) -> Subject:
    dtype, context = arguments.dtype, arguments.context
    ledger = Ledger()
    with _timed_library(ledger):
        host = HostAdapters()
        settings = RunnerSettings(
            dtype=dtype,
            quantization=arguments.quantization,
            max_model_len=context + 2 * arguments.steps,
            max_num_seqs=max(arguments.batches),
        )
        runner = load_runner(folder, settings, host)
    loader = InstantLoader(host, lambda source: random_adapter(source, getattr(torch, dtype)))
    scheduling = SchedulerSettings(enable_prefix_cache=False)
    engine = build_engine(runner, loader, SystemClock(), scheduling, adapter_host_bytes=1 << 30)
    _time_sections(engine, runner, ledger)
    config, itemsize = read_config(folder), getattr(torch, dtype).itemsize
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    linear_bytes = runner.capacity().weights_bytes - embedding * itemsize
    return Subject(engine, config, ledger, linear_bytes, itemsize, context)


@contextmanager
def _timed_library(ledger: Ledger) -> Iterator[None]:
    """Libraries that are used inside note the time of their functions."""
    original = NativeLibrary.function
    NativeLibrary.function = (  # type: ignore[method-assign]
        lambda self, name, *types: ledger.native(original(self, name, *types), types)
    )
    yield
    NativeLibrary.function = original  # type: ignore[method-assign]


def _time_sections(engine: Engine, runner: ModelRunner, ledger: Ledger) -> None:
    sections: tuple[tuple[str, Any, str], ...] = (
        ("scheduler", engine._scheduler, "plan"),
        ("scheduler", engine._scheduler, "absorb"),
        ("runner", runner, "launch"),
        ("lora batch", runner._adapter_bank, "lora_batch"),
        ("input batch", runner._batch, "prepare"),
        ("forward", runner._decoder, "forward"),
        ("sampler", runner._sampler, "sample"),
    )
    for name, owner, method in sections:
        setattr(owner, method, ledger.section(name, getattr(owner, method)))


def measure_steps(
    subject: Subject, batch: int, num_steps: int
) -> tuple[list[float], list[dict[str, float]]]:
    """Measure in turn the seconds of a plain step and the sections of a traced one."""
    engine, ledger = subject.engine, subject.ledger
    num_tokens = 2 * num_steps + 4
    add_requests(subject, batch, subject.context - num_steps, num_tokens)
    num_wanted = engine.stats().generation_tokens + 2 * batch
    while engine.stats().generation_tokens < num_wanted:
        engine.step()
    plain, sections = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        plain.append(time.perf_counter() - start)
        with ledger.step():
            engine.step()
        sections.append(dict(ledger.seconds))
    while not engine.is_idle:
        engine.step()
    return plain, sections


def add_requests(
    subject: Subject,
    batch: int,
    num_prompt_tokens: int,
    num_tokens: int,
    *,
    has_adapters: bool = True,
) -> None:
    """Random prompts; request i uses adapter i, or none of them any."""
    targets = tuple(
        LoraTarget(layer, module, RANK, *shapes[module])
        for layer, shapes in enumerate(subject.config.module_shapes)
        for module in MODULES
        if module in shapes
    )
    for index in range(batch):
        digest = f"adapter {index}"
        subject.engine.register_adapter(AdapterSource(digest, "", 1 << 20, targets))
        prompt = torch.randint(subject.config.vocab_size, (num_prompt_tokens,)).tolist()
        request = EngineRequest(
            request_id=time.monotonic_ns(),
            prompt_token_ids=tuple(prompt),
            task=Generate(
                SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
            ),
            eos_token_ids=(),
            adapters=(AdapterUse(digest),) if has_adapters else (),
            kv_salt=b"",
            tenant="",
            priority=0,
            arrival_ns=time.monotonic_ns(),
            deadline_ns=None,
        )
        subject.engine.add(request)


def floor_seconds(subject: Subject, limits: MachineLimits, batch: int) -> float:
    config, itemsize = subject.config, subject.itemsize
    num_weights = _layer_weights(config) + config.vocab_size * config.hidden_size
    of_weights = limits.floor_seconds(subject.linear_bytes, 2 * batch * num_weights)
    kv = sum(
        2 * min(subject.context, attention.window or subject.context) * attention.kv_size
        for attention in config.mixers_of(AttentionSpec)
    )
    lora = RANK * sum(
        sum(shapes[module])
        for shapes in config.module_shapes
        for module in MODULES
        if module in shapes
    )
    return of_weights + batch * (kv + lora) * itemsize / limits.read_bytes


def _layer_weights(config: ModelSpec) -> int:
    """Number of weights in the linear layers, without the one of the vocabulary."""
    return sum(
        inputs * outputs for shapes in config.module_shapes for inputs, outputs in shapes.values()
    )


def _num_pairs(window: int | None, num_tokens: int) -> int:
    """Pairs of a token and one that it sees, itself included."""
    seen = min(num_tokens, window or num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen


def prompt_of(subject: Subject, limits: MachineLimits) -> dict[str, float]:
    """A prompt alone, from its arrival to its first token."""
    engine, config, num_tokens = subject.engine, subject.config, subject.context
    times: list[float] = []
    while len(times) < 3 and sum(times) < QUICK_SECONDS:
        add_requests(subject, 1, num_tokens, 1)
        start = time.perf_counter()
        while not engine.is_idle:
            engine.step()
        times.append(time.perf_counter() - start)
    products = sum(
        attention.q_size * _num_pairs(attention.window, num_tokens)
        for attention in config.mixers_of(AttentionSpec)
    )
    flops = 2 * num_tokens * _layer_weights(config) + 4 * products
    flops += 2 * config.vocab_size * config.hidden_size
    floor = limits.floor_seconds(subject.linear_bytes, flops)
    return {
        "num_tokens": num_tokens,
        "ms": 1e3 * min(times),
        "gflops": flops / min(times) / 1e9,
        "floor_ms": 1e3 * floor,
        "share_of_floor": floor / min(times),
    }


def row_of(
    subject: Subject, limits: MachineLimits, batch: int, num_steps: int
) -> dict[str, float | dict[str, float]]:
    plain, watched = measure_steps(subject, batch, num_steps)
    names = sorted({name for sections in watched for name in sections})
    sections = {n: 1e3 * min(s.get(n, 0.0) for s in watched) for n in names}
    total = sum(sections.values())
    floor = floor_seconds(subject, limits, batch)
    step_ms = 1e3 * statistics.median(plain)
    return {
        "batch": batch,
        "step_ms": step_ms,
        "least_step_ms": 1e3 * min(plain),
        "sections_ms": sections,
        "python_share": (total - sections[NATIVE]) / total,
        "floor_ms": 1e3 * floor,
        "share_of_floor": 1e3 * floor / step_ms,
        "best_share_of_floor": floor / min(plain),
    }


def markdown(report: dict[str, Any]) -> str:
    rows = report["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["sections_ms"]))
    head = ["batch", "step ms", "least", "share of floor", "best", "Python", *names]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for row in rows:
        cells = [
            f"{row['batch']}",
            f"{row['step_ms']:.2f}",
            f"{row['least_step_ms']:.2f}",
            f"{row['share_of_floor']:.0%}",
            f"{row['best_share_of_floor']:.0%}",
            f"{row['python_share']:.1%}",
            *(f"{row['sections_ms'].get(name, 0.0):.3f}" for name in names),
        ]
        lines.append(" | ".join(cells))
    table = "\n".join(f"| {line} |" for line in lines)
    subject = f"{report['model']}, {report['dtype']}, quantization: {report['quantization']}"
    prompt = report["prompt"]
    of_prompt = (
        f"a prompt of {prompt['num_tokens']} tokens: {prompt['ms']:.0f} ms, "
        f"{prompt['gflops']:.0f} GFLOP/s, {prompt['share_of_floor']:.0%} of the floor"
    )
    return f"{subject}, {report['threads']} threads\n\n{of_prompt}\n\n{table}\n"


def slower_rows(
    report: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float
) -> list[str]:
    """A line for each row that is slower than in the baseline, in floors of its machine.

    tolerance: share of the baseline's speed that may be missing. Raises ValueError if the two
    measured different things.
    """
    for name in _SETTINGS:
        now, before = _setting(report, name), _setting(baseline, name)
        if now != before:
            raise ValueError(f"the baseline has {name} {before}, this run has {now}")
    before = {row["batch"]: row["best_share_of_floor"] for row in baseline["rows"]}
    missing = [row["batch"] for row in report["rows"] if row["batch"] not in before]
    if missing:
        raise ValueError(f"the baseline has no batch of {missing[0]}, only {sorted(before)}")
    return [
        f"batch {row['batch']}: {row['best_share_of_floor']:.0%} of the floor, "
        f"{before[row['batch']]:.0%} in the baseline"
        for row in report["rows"]
        if row["best_share_of_floor"] < (1 - tolerance) * before[row["batch"]]
    ]


def find_baseline(folder: Path, report: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the newest of the reports in a folder that a run can be compared with.

    Those were measured with the same settings, on a processor of the same name and vectors. Raises
    ValueError if there is none.
    """
    found = []
    for path in sorted(folder.glob("step-*.json")):
        baseline = json.loads(path.read_bytes())
        same = all(_setting(baseline, name) == _setting(report, name) for name in _SETTINGS)
        if same and baseline["machine"]["cpu_model"] == report["machine"]["cpu_model"]:
            found.append((path, baseline))
    if not found:
        settings = ", ".join(f"{name} {_setting(report, name)}" for name in _SETTINGS)
        raise ValueError(
            f"no step-*.json there is of this processor ({report['machine']['cpu_model']}) and "
            f"these settings: {settings}; make one with --json"
        )
    return found[-1]


def _setting(report: Mapping[str, Any], name: str) -> object:
    return report["limits"][name] if name == "vector_bytes" else report.get(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a GGUF file, or NAME:TYPE")
    parser.add_argument("--fixtures", type=Path, default=cache_directory() / "bench")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quantization",
        choices=[one.value for one in WeightPrecision],
        default=WeightPrecision.NATIVE.value,
    )
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compare", type=Path, metavar="BASELINE")
    parser.add_argument("--tolerance", type=float, default=0.15)
    arguments = parser.parse_args()
    place, baseline = arguments.compare, None
    if place is not None and not place.is_dir():
        try:
            baseline = json.loads(place.read_bytes())
        except (OSError, ValueError) as error:
            parser.error(f"--compare {place}: {error}")
    report = measure(arguments)
    print(json.dumps(report, indent=2) if arguments.json else markdown(report))
    if place is not None:
        try:
            if baseline is None:
                place, baseline = find_baseline(place, report)
            slower = slower_rows(report, baseline, arguments.tolerance)
        except ValueError as error:
            parser.error(f"--compare {place}: {error}")
        if slower:
            raise SystemExit(f"slower than the baseline {place}\n" + "\n".join(slower))
        print(f"not slower than {place}", file=sys.stderr)


def _model(text: str, fixtures: Path) -> tuple[Path, str]:
    """Return the place of the model, and its name in reports. Raises ConfigError."""
    path = Path(text)
    name, colon, gguf_type = text.partition(":")
    if path.exists() or not colon:
        return path, path.name
    return Fixture(find_shape(name), fixtures).gguf_file(gguf_type), text


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    limits = measure_limits(arguments.threads)
    model, name = _model(arguments.model, arguments.fixtures)
    with tempfile.TemporaryDirectory() as folders:
        folder = gguf_folder(model, Path(folders)) if model.suffix == SUFFIX else model
        subject = make_subject(folder, arguments)
        prompt = prompt_of(subject, limits)
        rows = [row_of(subject, limits, b, arguments.steps) for b in arguments.batches]
    return {
        "model": name,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "context": arguments.context,
        "threads": arguments.threads,
        "linear_bytes": subject.linear_bytes,
        "limits": dataclasses.asdict(limits),
        "machine": msgspec.to_builtins(this_machine()),
        "code": msgspec.to_builtins(this_code()),
        "prompt": prompt,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
