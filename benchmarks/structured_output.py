r"""What a constrained row costs: 0, 1, 8 and 32 of 32 rows that decode write JSON.

    PYTHONPATH=tests python benchmarks/structured_output.py [--model tiny] [--steps 40] \
        [--repeats 3] [--threads 2]

Writes benchmarks/results/structured-output.json and .md. One engine runs in this thread, greedy,
bfloat16, without adapters. The schema never ends: an array of objects with strings, an enum and
numbers. "Filling" is the time of the thread that makes the masks during the forward pass, "waited"
what of it the step waited for; "applied" is the rest that sampling takes, more than without
constrained rows; "reported" is what passing new tokens to the grammars takes, with draft tokens.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from comparison.fixtures import Fixture
from comparison.shapes import find_shape

from loraplex.app.rank import vocabulary_source
from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_pair
from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.environment import cache_directory
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.grammar.rows import GrammarRows
from loraplex.execution.loading import load_parts
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.registry import read_config
from loraplex.serving.grammar.forms import llguidance_form
from support.engine_requests import engine_request
from support.instant_loader import InstantLoader

NUM_ROWS = 32
NUM_PROMPT_TOKENS = 64
CONSTRAINED = (0, 1, 8, 32)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "minLength": 4, "maxLength": 24},
        "favourite_color": {"enum": ["red", "green", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "pattern": "^[a-z ]{4,24}$"},
                "number": {"type": "integer", "minimum": 1, "maximum": 9999},
            },
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "favourite_color", "age", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


class Run(msgspec.Struct, frozen=True):
    """Means over the steps of one run: milliseconds a step, and tokens of all rows a step."""

    step: float
    tokens: float
    forward: float
    sampling: float
    filling: float
    waited: float
    told: float  # language: quoted (a field of the results)


class Measured(msgspec.Struct, frozen=True):
    num_constrained: int
    fast_forward: bool
    runs: tuple[Run, ...]


class StructuredOutputReport(msgspec.Struct, frozen=True):
    created: str
    code: Code
    machine: Machine
    model: str
    num_rows: int
    first_row_seconds: float
    """Time to read the tokenizer and make the first mask, once in an engine's life."""
    measured: tuple[Measured, ...]


class Watch:
    """Seconds spent in some methods of one object."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


class Subject:
    """The model; every run has an engine, rows and grammars of its own."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._host = HostAdapters()
        settings = RunnerSettings(dtype="bfloat16", max_model_len=1024, max_num_seqs=NUM_ROWS)
        self._parts = load_parts(folder, settings, self._host)
        self._vocabulary = vocabulary_source(ModelConfig(path=str(folder)))
        self._vocab_size = read_config(folder).vocab_size
        self._grammar = Grammar(
            GrammarKind.LLGUIDANCE,
            llguidance_form(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))),
        )

    def engine(self, grammars: GrammarRows) -> Engine:
        device = self._parts.device
        sampler = Sampler(
            self._vocab_size, device=device, kernels=select_kernels(device), grammars=grammars
        )
        parts: RunnerParts = dataclasses.replace(self._parts, sampler=sampler)
        return build_engine(
            ModelRunner(parts),
            InstantLoader(self._host, _no_adapter),
            SystemClock(),
            SchedulerSettings(enable_prefix_cache=False),
            adapter_host_bytes=0,
        )

    def run(self, num_constrained: int, *, fast_forward: bool, num_steps: int) -> Run:
        grammars = GrammarRows(self._vocab_size, self._vocabulary, fast_forward=fast_forward)
        watch = Watch(grammars, "_fill", "bitmasks", "accept")
        engine = self.engine(grammars)
        for number in range(NUM_ROWS):
            engine.add(self._request(number, is_constrained=number < num_constrained))
        while engine.stats().generation_tokens < 8 * NUM_ROWS:
            engine.step()
        watch.seconds.update(dict.fromkeys(watch.seconds, 0.0))
        before = engine.stats().generation_tokens
        timings = []
        start = time.perf_counter()
        for _ in range(num_steps):
            record = engine.step().record
            assert record is not None
            timings.append(record.timing)
        seconds = time.perf_counter() - start
        num_tokens = engine.stats().generation_tokens - before
        engine.close()
        assert num_tokens >= NUM_ROWS * num_steps, "a row ended"
        per_step = 1e3 / num_steps
        return Run(
            step=seconds * per_step,
            tokens=num_tokens / num_steps,
            forward=statistics.mean(timing.forward_ns for timing in timings) / 1e6,
            sampling=statistics.mean(timing.sample_ns for timing in timings) / 1e6,
            filling=watch.seconds["_fill"] * per_step,
            waited=watch.seconds["bitmasks"] * per_step,
            told=watch.seconds["accept"] * per_step,
        )

    def _request(self, number: int, *, is_constrained: bool) -> EngineRequest:
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(self._vocab_size, (NUM_PROMPT_TOKENS,), generator=generator)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=900,
            ignore_eos=True,
            seed=0,
            grammar=self._grammar if is_constrained else None,
        )
        return engine_request(
            tuple(prompt.tolist()), sampling, request_id=number, eos_token_ids=(2,)
        )


def _no_adapter(_source: object) -> Any:
    raise AssertionError("no request has an adapter")


def first_row_seconds(subject: Subject) -> float:
    start = time.perf_counter()
    subject.run(1, fast_forward=True, num_steps=1)
    with_grammar = time.perf_counter() - start
    start = time.perf_counter()
    subject.run(0, fast_forward=True, num_steps=1)
    return with_grammar - (time.perf_counter() - start)


def measure(subject: Subject, repeats: int, num_steps: int) -> tuple[Measured, ...]:
    """All cases in turn, and again: what the machine does meanwhile meets each of them."""
    cases = [(count, on) for count in CONSTRAINED for on in (False, True) if count or not on]
    runs: dict[tuple[int, bool], list[Run]] = {case: [] for case in cases}
    for _ in range(repeats):
        for count, on in cases:
            runs[count, on].append(subject.run(count, fast_forward=on, num_steps=num_steps))
    return tuple(Measured(count, on, tuple(runs[count, on])) for count, on in cases)


def markdown(report: StructuredOutputReport) -> str:
    def median(measured: Measured, field: str) -> float:
        return float(statistics.median(getattr(run, field) for run in measured.runs))

    plain = report.measured[0]
    columns = (
        "constrained", "fast-forward", "ms/step", "tokens/step", "ms/token", "forward", "filling",
        "waited", "applied", "reported", "us/constrained token",
    )  # fmt: skip
    rows = []
    for each in report.measured:
        waited, reported = median(each, "waited"), median(each, "told")
        applied = median(each, "sampling") - waited - reported - median(plain, "sampling")
        num_tokens = each.num_constrained + median(each, "tokens") - NUM_ROWS
        added = waited + reported + applied
        rows.append(
            (
                f"{each.num_constrained} of {NUM_ROWS}",
                "on" if each.fast_forward else "off",
                f"{median(each, 'step'):.2f}",
                f"{median(each, 'tokens'):.1f}",
                f"{median(each, 'step') / median(each, 'tokens'):.3f}",
                f"{median(each, 'forward'):.2f}",
                f"{median(each, 'filling'):.2f}",
                f"{waited:.2f}",
                f"{applied:.2f}",
                f"{reported:.2f}",
                f"{1e3 * added / num_tokens:.0f}" if each.num_constrained else "",
            )
        )
    return "\n".join(
        [
            "# What a constrained row costs",
            "",
            f"Model `{report.model}`, bfloat16, {report.num_rows} rows that decode, greedy; "
            f"milliseconds a step, medians of {len(plain.runs)} runs. Filling runs during the",
            "forward pass; waited, applied and reported lengthen the step.",
            "",
            *machine_lines(report.created, report.code, report.machine),
            "",
            markdown_table(columns, rows),
            "",
            "The first constrained row of an engine's life reads the tokenizer: "
            f"{report.first_row_seconds:.1f} s, once.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a fixture: tiny or small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/structured-output"))
    options = parser.parse_args(arguments)
    fixture = Fixture(find_shape(options.model), cache_directory() / "bench")
    fixture.ensure_model()
    subject = Subject(fixture.model, options.threads)
    report = StructuredOutputReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        code=this_code(),
        machine=this_machine(),
        model=options.model,
        num_rows=NUM_ROWS,
        first_row_seconds=first_row_seconds(subject),
        measured=measure(subject, options.repeats, options.steps),
    )
    write_pair(report, markdown(report), options.output.with_suffix(".json"))
    print(markdown(report))


if __name__ == "__main__":
    main()
