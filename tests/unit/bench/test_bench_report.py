import subprocess

import msgspec
import pytest

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.machine import Code, Machine, this_code, this_machine
from loraplex.bench.popularity import BaseOnly, Identical
from loraplex.bench.report import (
    Report,
    Served,
    WorkloadResult,
    markdown,
    write_report,
)
from loraplex.bench.settings import BenchSettings
from loraplex.bench.statistics import Ratio, RequestRecord, median_of_runs, summarize
from loraplex.bench.workload import Lengths
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def result(workload, ratio: Ratio | None = None, **fields) -> WorkloadResult:
    second = 10**9
    record = RequestRecord(
        start_ns=0,
        chunk_ns=(second // 100, second // 50),
        end_ns=second,
        num_prompt_tokens=4,
        num_output_tokens=2,
        **fields,
    )
    runs = (summarize([record], 0), summarize([record, record], 0))
    return WorkloadResult(
        workload=workload,
        runs=runs,
        median=median_of_runs(runs),
        throughput_ratio_to_base=ratio,
    )


@pytest.fixture
def report(workload) -> Report:
    base = workload(popularity=BaseOnly())
    return Report(
        created="2030-01-02T03:04:05+00:00",
        code=Code(version="0.1.0", commit=COMMIT, is_modified=False),
        machine=Machine(
            cpu_model="Abacus",
            num_cores=2,
            memory_bytes=4 << 30,
            system="Linux 6 x86_64",
            python="3.11.7",
            load_average=0.25,
        ),
        served=Served(model="capitals", url=None, adapter_rank=8),
        settings=BenchSettings(
            loads=(ClosedLoop(2),),
            popularities=(Identical(),),
            num_adapters=3,
            num_requests=None,
            prompt_tokens=Lengths(4, 4),
            output_tokens=Lengths(5, 7),
            repeats=2,
            seed=11,
        ),
        results=(
            result(base),
            result(workload(popularity=Identical()), Ratio(0.875, 0.8, 0.9)),
        ),
    )


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    json_path, markdown_path = write_report(report, tmp_path / "new" / "folder")
    assert json_path.name == "bench-20300102T030405-0123456789ab.json"
    assert msgspec.json.decode(json_path.read_bytes(), type=Report) == report
    assert markdown_path.name == "bench-20300102T030405-0123456789ab.md"
    assert markdown_path.read_text() == markdown(report)


def test_the_json_names_what_it_holds(report, tmp_path):
    values = msgspec.json.decode(write_report(report, tmp_path)[0].read_bytes())
    assert values["code"]["commit"] == COMMIT
    assert values["machine"]["cpu_model"] == "Abacus"
    assert values["results"][1]["workload"]["popularity"] == {"type": "identical"}
    assert values["results"][1]["median"]["time_to_first_token"]["p99"] == 0.01


def test_the_table_is_aligned_and_complete(report):
    lines = [line for line in markdown(report).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    base, adapted = cells[2:]
    assert base[:2] == ["closed:2", "base"]
    assert base[-1] == "-"
    assert adapted == [
        "closed:2",
        "identical",
        "1.50",
        "3.0",
        "10.0 / 10.0 / 10.0",
        "10.0 / 10.0 / 10.0",
        "10.0 / 10.0 / 10.0",
        "1000.0 / 1000.0 / 1000.0",
        "0.88 (0.80-0.90)",
    ]


def test_the_circumstances_are_reported(report):
    text = markdown(report)
    for part in (
        COMMIT,
        "Abacus, 2 cores, 4 GiB",
        "0.25",
        "seed 11",
        "3 random adapters of rank 8",
    ):
        assert part in text
    assert "with changes" not in text
    assert "FAILED" not in text
    assert "prefix cache" not in text


def test_it_ends_with_what_it_comes_to(report):
    assert markdown(report).splitlines()[-1] == (
        "closed:2, identical: 3 of 3 requests succeeded, with 3 output tokens a second, 0.88 times "
        "those of the base model alone. The first token took 10 ms (median) and 10 ms (99th "
        "percentile)."
    )


def test_failures_are_in_what_it_comes_to(report, workload):
    failed = msgspec.structs.replace(
        report, results=(result(workload(), error="status 429: full"),)
    )
    assert "0 of 3 requests succeeded" in markdown(failed).splitlines()[-1]


def test_what_makes_figures_doubtful_is_reported(report, workload):
    text = markdown(
        msgspec.structs.replace(
            report,
            code=Code(version="0.1.0", commit=COMMIT, is_modified=True),
            served=Served(model="m", url="http://elsewhere:8000"),
            results=(
                result(workload(), error="status 429: full"),
                result(workload(), num_cached_tokens=1),
            ),
        )
    )
    assert f"commit {COMMIT} with changes" in text
    assert "m at http://elsewhere:8000" in text
    assert "3 requests FAILED and are left out: status 429: full" in text
    assert "3 of 12 prompt tokens were in the prefix cache" in text


def test_a_folder_that_cannot_be_is_said(report, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write a report into"):
        write_report(report, tmp_path / "file")


def test_this_machine_has_something_of_everything():
    machine = this_machine()
    assert machine.cpu_model
    assert machine.num_cores >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > 1 << 20


def git(folder, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_is_that_of_the_package(tmp_path):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "of something else")
    # In a repository, but not of it: as a virtual environment is.
    assert this_code(package) == Code(version=__version__, commit=None, is_modified=False)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert this_code(package) == Code(version=__version__, commit=commit, is_modified=False)
    (package / "untracked").touch()
    assert not this_code(package).is_modified
    (package / "__init__.py").write_text("changed")
    assert this_code(package).is_modified
