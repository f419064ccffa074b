"""Medians, spreads and ratios by hand; the report as golden text."""

from pathlib import Path

import msgspec
import pytest
from comparison.findings import find, ours_for, throughput_over
from comparison.first_use import FirstUseFigures
from comparison.journal import (
    Checked,
    ComparisonSettings,
    Header,
    Journal,
    Measured,
    Started,
    Subject,
)
from comparison.processes import Launch
from comparison.report import (
    ComparisonReport,
    comparison_markdown,
    comparison_report,
    write_comparison,
)
from comparison.right_answers import Verdict

from loraplex.bench.machine import Code, Machine
from loraplex.bench.statistics import Ratio, RequestRecord, summarize

OURS = Subject(
    name="loraplex fp32",
    weights="32-bit",
    weight_bits=32,
    is_http=True,
    mixes_adapters=True,
    version="0.1.0",
)
LIBRARY = msgspec.structs.replace(OURS, name="loraplex fp32, library", is_http=False)
PEER = Subject(
    name="peer f32",
    weights="32-bit",
    weight_bits=32,
    is_http=False,
    mixes_adapters=False,
    version="9",
)
SECOND = 10**9

GOLDEN = Path(__file__).parent / "golden" / "comparison.md"


def figures(tokens_per_second: int, error: str | None = None):
    """A run of one second; the first token after 10 ms, the second after 10 more."""
    record = RequestRecord(
        start_ns=0,
        chunk_ns=(SECOND // 100, SECOND // 50),
        end_ns=SECOND,
        num_prompt_tokens=4,
        num_output_tokens=tokens_per_second,
        error=error,
    )
    return summarize([record], 0)


def run(subject, case: str, number: int, **fields) -> Measured:
    fields = {"stage": "standard", "resident_bytes": 1 << 30} | fields
    return Measured(system=subject.name, case=case, round=number, **fields)


@pytest.fixture
def journal(tmp_path) -> Journal:
    header = Header(
        created="2030-01-02T03:04:05+00:00",
        code=Code(version="0.1.0", commit="abc", is_modified=False),
        machine=Machine(
            cpu_model="Abacus",
            num_cores=2,
            memory_bytes=4 << 30,
            system="Linux",
            python="3.11",
            load_average=0.25,
            cpu_flags=("avx2", "fpu"),
            packages={"torch": "9.9"},
        ),
        settings=ComparisonSettings(
            model="tiny",
            num_parameters=56_369_664,
            groups=("W2",),
            rounds=3,
            num_threads=2,
            num_many=6,
            seed=0,
            is_restarting=False,
        ),
        subjects=(OURS, LIBRARY, PEER),
    )
    journal = Journal.open(tmp_path / "journal.jsonl", header)
    for number, (ours, theirs) in enumerate([(100, 100), (400, 200), (200, 100)]):
        size = (number + 1) << 30
        journal.add(run(OURS, "W2-8", number, figures=figures(ours), resident_bytes=size))
        journal.add(run(LIBRARY, "W2-8", number, figures=figures(2 * ours)))
        journal.add(run(PEER, "W2-8", number, figures=figures(theirs)))
    journal.add(run(OURS, "W3-8", 0, figures=figures(50, "status 500")))
    for number, rate in enumerate([100, 200, 100]):
        if number:
            journal.add(run(OURS, "W3-8", number, figures=figures(rate), adapter_loads=4.0))
    journal.add(run(OURS, "W3-8", 3, figures=figures(100), adapter_loads=4.0))
    journal.add(run(PEER, "W3-8", 0, error="trace\nnot timed, its outputs are wrong"))
    journal.add(run(PEER, "W4", 0, error="not timed, its outputs are wrong"))
    for number, cold in enumerate([0.1, 0.04, 0.03]):
        first_use = FirstUseFigures(cold_seconds=cold, register_seconds=0.01, warm_seconds=0.01)
        journal.add(run(OURS, "W5-r8-new", number, stage="first use", first_use=first_use))
    right = Verdict(problems=(), num_equal=30, num_asked=30, is_compared_with_reference=True)
    wrong = Verdict(
        problems=("the base in a mixed batch got the output of adapter 3",),
        num_equal=24,
        num_asked=30,
    )
    journal.add(Checked(system=OURS.name, stage="standard", verdict=right))
    journal.add(Checked(system=PEER.name, stage="standard", verdict=wrong))
    journal.add(
        Started(
            system=OURS.name,
            stage="standard",
            seconds=2.5,
            resident_bytes=1 << 29,
            idle_cores=0.0,
            launch=Launch(
                command=("loraplex", "serve", "--adapters=" + "a," * 100),
                inherited={"OMP_NUM_THREADS": "4"},
            ),
            children={"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"},
        )
    )
    journal.add(
        Started(
            system=PEER.name,
            stage="standard",
            seconds=1.0,
            resident_bytes=1 << 29,
            idle_cores=1.0,
            launch=Launch(command=("peer", "--poll", "0"), added={"OMP_NUM_THREADS": "2"}),
            children={"OMP_NUM_THREADS": "2"},
        )
    )
    return journal


def test_ratios_are_paired_by_round(journal):
    ours, _, theirs, *_ = find(journal)
    # The median of 1, 2 and 2, and not 200 over 100 of the medians' own rounds.
    assert throughput_over(ours, theirs) == Ratio(2.0, 1.0, 2.0)
    assert throughput_over(theirs, ours) == Ratio(0.5, 0.5, 1.0)


def test_each_is_compared_with_ours_that_is_called_in_the_same_way(journal):
    ours, library, theirs, *_ = findings = find(journal)
    assert ours_for(theirs, findings) == library
    served = msgspec.structs.replace(
        theirs, subject=msgspec.structs.replace(PEER, name="server f32", is_http=True)
    )
    assert ours_for(served, findings) == ours
    assert ours_for(theirs, [ours, theirs]) is None
    assert ours_for(ours, findings) is None
    assert ours_for(library, findings) is None


def test_only_rounds_that_both_have_are_compared(journal):
    by_case = {(f.case, f.subject.name): f for f in find(journal)}
    adapted, base = by_case["W3-8", OURS.name], by_case["W2-8", OURS.name]
    assert [one.round for one in adapted.runs] == [1, 2, 3]
    assert throughput_over(adapted, base) == Ratio(0.5, 0.5, 0.5)


def test_a_later_run_replaces_an_earlier_one(journal):
    journal.add(run(OURS, "W3-8", 0, figures=figures(100)))
    adapted = next(f for f in find(journal) if f.case == "W3-8")
    assert [one.round for one in adapted.runs] == [0, 1, 2, 3]
    assert adapted.errors == ()


def test_the_report_as_text(journal):
    assert comparison_markdown(comparison_report(journal)) == GOLDEN.read_text()


def test_the_json_holds_all_of_it(journal, tmp_path):
    report = comparison_report(journal)
    json_path, markdown_path = write_comparison(report, tmp_path / "v1.0")
    assert (json_path.name, markdown_path.name) == ("v1.0.json", "v1.0.md")
    assert msgspec.json.decode(json_path.read_bytes(), type=ComparisonReport) == report
    assert markdown_path.read_text() == comparison_markdown(report)


def test_the_plots_are_the_same_twice(journal, tmp_path):
    pytest.importorskip("matplotlib")
    from comparison.plots import write_plots

    findings = find(journal)
    first = write_plots(findings, tmp_path / "one")
    assert [path.name for path in first] == ["one-throughput.svg", "one-ttft.svg", "one-itl.svg"]
    again = write_plots(findings, tmp_path / "two")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    text = first[0].read_text()
    assert "loraplex fp32" in text
    assert "W3-8" in text


def test_without_figures_there_are_no_plots(journal, tmp_path):
    from comparison.plots import write_plots

    assert write_plots([f for f in find(journal) if f.first_uses], tmp_path / "none") == []
