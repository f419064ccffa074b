r"""What draft tokens (prompt lookup) gain, by text, sequences at a time and length of drafts.

    PYTHONPATH=tests python benchmarks/drafting.py [--drafts 4 8] [--streams 1 8 32] \
        [--rounds 3] [--models shipped tiny] [--output benchmarks/results/drafting]

One engine runs in this thread; texts of the shipped capitals model in float32, and random tokens
of the random Llama `tiny` in bfloat16, whose steps are long. Every case runs without and with
drafts in turns, with the same requests; the outputs must be equal, or nothing is written. A ratio
is that of the medians of the rounds' seconds, without over with; "accepted" is a share of all draft
tokens.
"""

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from comparison.fixtures import Fixture
from comparison.shapes import find_shape
from tokenizers import Tokenizer

from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_pair
from loraplex.core.clock import SystemClock
from loraplex.core.environment import cache_directory
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.demo import BASE_PATH
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.settings import RunnerSettings
from support.engine_requests import engine_request
from support.instant_loader import InstantLoader

NUM_OUTPUTS: Final = 128
NUM_RANDOM: Final = 64
"""Tokens of a random prompt."""
PLACES: Final = ("France", "Japan", "Italy", "Spain", "Germany", "Austria", "Norway", "Egypt")
TEXTS: Final = {
    "extraction": " ".join(f"The capital of {place} is" for place in PLACES) + " The capital of",
    "list": "".join(f"{number}. {place}\n" for number, place in enumerate(PLACES)),
    "code edit": "".join(f'capital["{place}"] = find("{place}")\n' for place in PLACES),
    "sentence": "The capital of France is",
}
SHIPPED: Final = "shipped"


class Run(msgspec.Struct, frozen=True):
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int


class Case(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    text: str
    temperature: float
    num_streams: int
    runs: dict[int, list[Run]]
    """Runs of the rounds, by the maximum of draft tokens."""

    def ratio(self, num_drafts: int) -> float:
        """Return how many times as fast the case is with drafts."""
        without, with_drafts = (
            statistics.median(run.seconds for run in self.runs[count]) for count in (0, num_drafts)
        )
        return without / with_drafts


class Report(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    code: Code
    machine: Machine
    cases: list[Case]


class Subject:
    """The engine of a model."""

    def __init__(self, model: str, num_streams: int) -> None:
        self.model = model
        self._num_streams = num_streams
        folder = BASE_PATH
        if model != SHIPPED:
            fixture = Fixture(find_shape(model), cache_directory() / "bench")
            fixture.ensure_model()
            folder = fixture.model
        self._host = HostAdapters()
        settings = RunnerSettings(
            dtype="float32" if model == SHIPPED else "bfloat16",
            max_model_len=1024,
            max_num_seqs=num_streams,
        )
        self._runner = load_runner(folder, settings, self._host)
        self._tokenizer = Tokenizer.from_file(str(BASE_PATH / "tokenizer.json"))
        self._engine = build_engine(
            self._runner,
            InstantLoader(self._host, _no_adapter),
            SystemClock(),
            SchedulerSettings(enable_prefix_cache=False),
            adapter_host_bytes=0,
        )
        self._ids = itertools.count()

    def prompt(self, text: str, number: int) -> tuple[int, ...]:
        """Return the tokens of a prompt; those of each sequence begin differently."""
        if text:
            return tuple(self._tokenizer.encode(f"{number} {TEXTS[text]}").ids)
        generator = torch.Generator().manual_seed(number)
        vocab_size = self._runner.capacity().vocab_size
        return tuple(torch.randint(vocab_size, (NUM_RANDOM,), generator=generator).tolist())

    def run(self, text: str, temperature: float, num_drafts: int) -> tuple[Run, list[list[int]]]:
        """Return what a run took, and the outputs."""
        engine, before = self._engine, self._engine.stats()
        outputs: dict[int, list[int]] = {}
        for number in range(self._num_streams):
            outputs[request_id := next(self._ids)] = []
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=NUM_OUTPUTS,
                ignore_eos=True,
                seed=number,
                num_draft_tokens=num_drafts,
            )
            prompt = self.prompt(text, number)
            engine.add(engine_request(prompt, sampling, request_id=request_id))
        num_steps = 0
        start = time.perf_counter()
        while not engine.is_idle:
            turn = engine.step()
            num_steps += turn.record is not None
            for output in turn.outputs:
                assert output.error is None, output.error
                for delta in output.deltas:
                    outputs[output.request_id].extend(delta.token_ids)
        seconds = time.perf_counter() - start
        stats = engine.stats()
        num_drafted = stats.draft_tokens - before.draft_tokens
        num_accepted = stats.accepted_tokens - before.accepted_tokens
        return Run(seconds, num_steps, num_drafted, num_accepted), [*outputs.values()]


def _no_adapter(_source: object) -> None:
    raise AssertionError("no request has an adapter")


def measure(subject: Subject, num_streams: int, drafts: Sequence[int], rounds: int) -> list[Case]:
    """Return the cases of one model and number of sequences."""
    kinds = [("", 0.0), ("", 0.7)]
    if subject.model == SHIPPED:
        kinds = [*((text, 0.0) for text in TEXTS), ("sentence", 0.7)]
    cases = []
    for text, temperature in kinds:
        subject.run(text, temperature, 0)  # what is compiled and packed at the first one
        runs: dict[int, list[Run]] = {count: [] for count in (0, *drafts)}
        expected = None
        for _ in range(rounds):
            for num_drafts, results in runs.items():
                result, outputs = subject.run(text, temperature, num_drafts)
                assert expected in (None, outputs), "drafts have changed an output"
                expected = outputs
                results.append(result)
        cases.append(
            Case(
                model=subject.model,
                text=text or "random tokens",
                temperature=temperature,
                num_streams=num_streams,
                runs=runs,
            )
        )
        print(tables(cases[-1:]).splitlines()[-1])
    return cases


def tables(cases: Sequence[Case]) -> str:
    drafts = [count for count in cases[0].runs if count]
    columns = ["model", "text", "temperature", "streams"]
    columns += [f"{count} draft tokens: times as fast, accepted" for count in drafts]
    rows = []
    for case in cases:
        cells = [case.model, case.text, f"{case.temperature:g}", f"{case.num_streams}"]
        for count in drafts:
            run = case.runs[count][0]
            share = 100 * run.num_accepted / run.num_drafted if run.num_drafted else 0
            cells.append(f"{case.ratio(count):.2f}, {share:.0f} % of {run.num_drafted}")
        rows.append(cells)
    return markdown_table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[SHIPPED, "tiny"])
    parser.add_argument("--threads", type=int, default=2)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "drafting")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases: list[Case] = []
    for model in options.models:
        for num_streams in options.streams:
            subject = Subject(model, num_streams)
            cases += measure(subject, num_streams, options.drafts, options.rounds)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = Report(created=created, code=this_code(), machine=this_machine(), cases=cases)
    head = ["# Draft tokens", "", *machine_lines(report.created, report.code, report.machine), ""]
    write_pair(report, "\n".join([*head, tables(cases), ""]), options.output.with_suffix(".json"))


if __name__ == "__main__":
    main()
