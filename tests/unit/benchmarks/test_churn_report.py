import msgspec
import pytest
from comparison.adapter_tiers import TierCounters
from comparison.churn_report import (
    ChurnReport,
    Tiers,
    Turn,
    markdown,
    side_of,
    table,
    write_churn,
)

from loraplex.bench.machine import Code, Machine
from loraplex.bench.statistics import RequestRecord, throughput_ratio
from loraplex.core.errors import ConfigError

MS = 1_000_000
TIERS = Tiers(num_device=1, num_host=2, device_bytes=100, host_bytes=200)
NO_COUNTS = TierCounters(**dict.fromkeys(TierCounters.__struct_fields__, 0))
LAST, BEFORE, EARLIER = TIERS.labels()


def turn(workload, start_ms: int, adapters: list[int], *, ttft_ms: int, **fields) -> Turn:
    """Requests one after the other, of 10 ms each."""
    starts = [(start_ms + 10 * index) * MS for index in range(len(adapters))]
    records = tuple(
        RequestRecord(
            start_ns=start,
            chunk_ns=(start + ttft_ms * MS, start + 9 * MS),
            end_ns=start + 9 * MS,
            num_output_tokens=2,
        )
        for start in starts
    )
    counters = msgspec.structs.replace(NO_COUNTS, **fields)
    return Turn(
        workload=workload,
        start_ns=starts[0],
        adapters=tuple(adapters),
        records=records,
        counters=counters,
    )


@pytest.fixture
def workloads(workload):
    return workload(num_adapters=1), workload(num_adapters=5)


@pytest.fixture
def turns(workloads) -> list[Turn]:
    few, many = workloads
    return [
        turn(few, 0, [0, 0], ttft_ms=1, loads=1, device_hits=1, device_misses=1),
        turn(many, 100, [1, 2, 3, 4], ttft_ms=4, loads=4, device_misses=4, read_seconds=0.2),
        turn(many, 200, [4, 3, 2, 1], ttft_ms=2, loads=3, device_hits=1, device_misses=3),
        turn(few, 300, [0, 0], ttft_ms=3, loads=1, device_hits=1, device_misses=1),
    ]


@pytest.fixture
def report(turns, workloads) -> ChurnReport:
    few, many = (side_of(workload, turns, TIERS) for workload in workloads)
    return ChurnReport(
        created="2026-01-02T03:04:05+00:00",
        code=Code(version="1.0", commit="a" * 40, is_modified=False),
        machine=Machine(
            cpu_model="cpu",
            num_cores=2,
            memory_bytes=None,
            system="system",
            python="3.11",
            load_average=None,
        ),
        model="tiny",
        serve_flags=("--device", "cpu"),
        tiers=TIERS,
        ready_seconds=12.3,
        few=few,
        many=many,
        num_registered=5,
        throughput_ratio=throughput_ratio(many.runs, few.runs),
        num_listed=5,
        num_on_device=1,
        num_on_host=0,
    )


def failed(report: ChurnReport) -> ChurnReport:
    median = msgspec.structs.replace(report.many.median, num_failed=1, errors=("it broke",))
    return msgspec.structs.replace(
        report,
        many=msgspec.structs.replace(report.many, median=median),
        throughput_ratio=None,
    )


def test_the_nearest_tier():
    assert [TIERS.nearest(distance) for distance in (0, 1, 2, 3, None)] == [
        *(LAST, BEFORE, BEFORE, EARLIER, EARLIER)
    ]


def test_a_side_has_its_own_turns_only(report):
    assert report.few.median.num_requests == 4
    assert report.many.median.num_requests == 8
    assert len(report.many.runs) == 2
    assert (report.few.counters.loads, report.many.counters.loads) == (2, 7)
    assert report.many.counters.device_hit_rate == 1 / 8


def test_waits_are_reported_by_tier_and_the_other_side_uses_the_tiers_too(report):
    few = {wait.label: wait for wait in report.few.waits}
    # Adapter 0 is new at first, and after the many; right after itself it is on the device.
    assert [few[label].num_requests for label in (LAST, BEFORE, EARLIER)] == [2, 0, 2]
    assert few[LAST].time_to_first_token.p50 == pytest.approx(0.002)
    assert few[BEFORE].time_to_first_token is None
    many = {wait.label: wait for wait in report.many.waits}
    # 4 was used last; 3 and 2 are one and two before it when they come; 1 is three before.
    assert [many[label].num_requests for label in (LAST, BEFORE, EARLIER)] == [1, 2, 5]
    assert many[BEFORE].time_to_first_token.p50 == pytest.approx(0.002)
    assert many[EARLIER].time_to_first_token.p50 == pytest.approx(0.004)


def test_requests_that_failed_have_no_wait(turns, workloads):
    few, _ = workloads
    broken = msgspec.structs.replace(turns[0].records[0], error="it broke")
    turns[0] = msgspec.structs.replace(turns[0], records=(broken, *turns[0].records[1:]))
    side = side_of(few, turns, TIERS)
    assert sum(wait.num_requests for wait in side.waits) == 3
    assert side.median.num_failed == 1


def test_the_table(report):
    head, _, *rows = table(report).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["", "1 adapters", "5 adapters"]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    found = {name: (few, many) for name, few, many in cells}
    assert found["requests"] == ("4", "8")
    assert found["lost"] == ("0", "0")
    assert found["loads"] == ("2", "7")
    assert found["hit rate on the device"] == ("50.0%", "12.5%")
    assert found["of its misses, hit rate on the host"] == ("-", "-")
    assert found["ms a load, ms a copy"] == ("0.00, -", "28.57, -")
    assert found[f"TTFT ms, {LAST}"] == ("2.0 / 2.8 / 3.0 (2)", "2.0 / 2.0 / 2.0 (1)")
    assert found[f"TTFT ms, {BEFORE}"][0] == "- (0)"
    assert found["tok/s to 1 adapters"][0] == "1"
    assert found["tok/s to 1 adapters"][1].startswith("0.97")


def test_what_was_lost_is_reported(report):
    assert report.is_whole
    assert "FAILED" not in markdown(report)
    assert not failed(report).is_whole
    assert "FAILED and are left out: it broke" in markdown(failed(report))
    assert table(failed(report)).splitlines()[-1].split("|")[3].strip() == "-"
    assert not msgspec.structs.replace(report, num_listed=4).is_whole


def test_files(report, tmp_path):
    json_path, markdown_path = write_churn(report, tmp_path / "new")
    assert json_path.name == "adapter-churn-20260102T030405-aaaaaaaaaaaa.json"
    assert msgspec.json.decode(json_path.read_bytes(), type=ChurnReport) == report
    assert markdown_path.read_text() == markdown(report)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write a report into"):
        write_churn(report, tmp_path / "file")
