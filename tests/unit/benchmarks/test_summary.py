"""The table of large models, by hand."""

import msgspec
import pytest
from comparison.findings import Finding
from comparison.held_streams import HeldFigures, Rung
from comparison.journal import Limits, Measured, Started, Subject
from comparison.processes import Launch
from comparison.summary import summary_lines

from loraplex.bench.statistics import Percentiles, RequestRecord, summarize

OURS = Subject(
    name="loraplex gguf:Q4_K_M",
    weights="gguf:Q4_K_M",
    weight_bits=4,
    is_http=True,
    mixes_adapters=True,
    version="1",
)
PEER = msgspec.structs.replace(OURS, name="llama.cpp gguf:Q4_K_M", mixes_adapters=False)
LIBRARY = msgspec.structs.replace(OURS, name="loraplex gguf:Q4_K_M, library", is_http=False)
LIMITS = Limits(read_bytes=4e10, flops=1e11, token_bytes={"gguf:Q4_K_M": 4_000_000_000})
MILLISECOND = 10**6


def figures(first_ms: int, gap_ms: int, num_tokens: int = 11):
    times = [first_ms + gap_ms * number for number in range(num_tokens)]
    record = RequestRecord(
        start_ns=0,
        chunk_ns=tuple(MILLISECOND * time for time in times),
        end_ns=MILLISECOND * times[-1],
        num_prompt_tokens=64,
        num_output_tokens=num_tokens,
    )
    return summarize([record], 0)


def finding(subject: Subject, case: str, **fields) -> Finding:
    run = Measured(
        system=subject.name,
        stage="standard",
        case=case,
        round=0,
        resident_bytes=6 << 30,
        file_bytes=5 << 30,
        **fields,
    )
    median = fields.get("figures")
    return Finding(
        stage="standard", case=case, subject=subject, runs=(run,), median=median, errors=()
    )


def started(subject: Subject, kind: str, seconds: float) -> Started:
    return Started(
        system=subject.name,
        stage="standard",
        seconds=seconds,
        kind=kind,
        resident_bytes=1,
        idle_cores=0.0,
        launch=Launch(command=("serve",)),
    )


def held(*rungs: tuple[int, float, float]) -> HeldFigures:
    return HeldFigures(
        limit_seconds=0.1,
        rungs=tuple(
            Rung(
                num_streams=count,
                output_tokens_per_second=7.0 * count,
                between_tokens=Percentiles(p90, p90, p99),
            )
            for count, p90, p99 in rungs
        ),
    )


@pytest.fixture
def findings():
    return [
        finding(OURS, "W1", figures=figures(1000, 200)),
        finding(PEER, "W1", figures=figures(2000, 250)),
        finding(LIBRARY, "W1", figures=figures(1000, 200)),
        finding(OURS, "held", held=held((1, 0.05, 0.06), (2, 0.09, 0.2), (3, 0.2, 0.3))),
        finding(PEER, "held", held=held((1, 0.2, 0.3))),
    ]


@pytest.fixture
def starts():
    return [
        *(started(OURS, kind, seconds) for kind, seconds in (("first", 60), ("cold", 20))),
        started(OURS, "warm", 5),
        *(started(PEER, kind, seconds) for kind, seconds in (("cold", 10), ("warm", 10))),
    ]


def rows(lines):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in "\n".join(lines).splitlines()
        if line.startswith("|")
    ]


def test_a_row_for_each_system_with_ratios_of_peers(findings, starts):
    (titles, _, ours, peer, library, *_) = rows(summary_lines(findings, starts, LIMITS))
    found = dict(zip(titles, ours, strict=True))
    assert found["TTFT, 1 prompt, ms"] == "1000"
    assert found["decode, 1 stream, tok/s"] == "5.00"
    assert found["of the byte floor, %"] == "50"  # 4 GB at 40 GB/s are 100 ms, a token took 200
    assert found["8 streams, tok/s"] == "-"
    assert (found["cold start, s"], found["warm start, s"]) == ("20.0", "5.0")
    assert (found["memory, GiB"], found["mapped files, GiB"]) == ("1.00", "5.00")
    found = dict(zip(titles, peer, strict=True))
    assert found["TTFT, 1 prompt, ms"] == "2000 (2.00x)"
    assert found["decode, 1 stream, tok/s"] == "4.00 (1.25x)"
    assert found["of the byte floor, %"] == "40"
    assert found["cold start, s"] == "10.0 (0.50x)"
    assert library[1] == "1000"


def test_the_streams_that_are_held(findings, starts):
    *_, ours, peer = rows(summary_lines(findings, starts, LIMITS))
    assert ours == ["loraplex gguf:Q4_K_M", "2", "14.0", "1", "7.0"]
    assert peer == ["llama.cpp gguf:Q4_K_M", "0", "0.0", "0", "0.0"]


def test_no_summary_without_measured_starts(findings):
    assert [*summary_lines(findings, [started(OURS, "", 3.0)], LIMITS)] == []


def test_no_share_of_a_floor_without_limits(findings, starts):
    lines = [*summary_lines(findings, starts, None)]
    (titles, _, ours, *_) = rows(lines)
    assert dict(zip(titles, ours, strict=True))["of the byte floor, %"] == "-"
    assert not any("GB/s" in line for line in lines)
