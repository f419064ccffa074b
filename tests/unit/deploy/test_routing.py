import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.deploy.routing import (
    MAX_RECENT,
    MAX_RESIDENTS,
    AdapterRouting,
    ReplicaReport,
    Residents,
    adapter_key,
    model_and_adapter,
)

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)


def routing(**on_device: list[str]) -> AdapterRouting:
    """A router of four replicas with eight slots each, and the adapters on their devices."""
    made = AdapterRouting()
    for name in NAMES:
        residents = bytes(Residents.of(on_device.get(name, [])))
        made.take_report(name, ReplicaReport(num_slots=8, on_device=residents))
    return made


@given(st.lists(st.text(max_size=8), max_size=40), st.text(max_size=8))
def test_a_compact_set_has_the_names_it_was_made_of(names: list[str], other: str) -> None:
    residents = Residents(bytes(Residents.of(names)))
    assert all(adapter_key(name) in residents for name in names)
    assert (adapter_key(other) in residents) == (adapter_key(other) in map(adapter_key, names))


def test_a_compact_set_is_bounded() -> None:
    assert len(Residents.of(f"adapter-{i}" for i in range(2 * MAX_RESIDENTS))) == MAX_RESIDENTS
    assert len(Residents(bytes(8 * MAX_RESIDENTS))) == MAX_RESIDENTS


def test_a_request_goes_to_the_replica_that_has_its_adapter() -> None:
    assert routing(c=["zh"]).rank("zh", {"a": 0, "b": 0, "c": 7, "d": 0})[0] == "c"


def test_a_popular_adapter_spills_once_requests_would_wait_for_it() -> None:
    router = routing(c=["zh"])
    assert router.rank("zh", {**IDLE, "c": 7})[0] == "c"
    assert router.rank("zh", {**IDLE, "c": 9})[0] != "c"


def test_of_replicas_with_the_adapter_the_least_loaded_is_best() -> None:
    assert routing(a=["zh"], b=["zh"]).rank("zh", {"a": 3, "b": 2, "c": 0, "d": 0})[:2] == [
        "b",
        "a",
    ]


def test_an_adapter_on_the_host_is_better_than_one_that_has_to_be_read() -> None:
    router = routing()
    on_host = bytes(Residents.of(["zh"]))
    router.take_report("d", ReplicaReport(num_slots=8, on_host=on_host))
    assert router.rank("zh", {"a": 0, "b": 0, "c": 0, "d": 5})[0] == "d"


def test_requests_of_the_base_model_go_where_the_least_load_is() -> None:
    assert routing(a=["zh"]).rank("", {"a": 3, "b": 2, "c": 1, "d": 4}) == ["c", "b", "a", "d"]


def test_an_unknown_adapter_has_one_home_for_all_routers() -> None:
    homes = {routing().rank("new", IDLE)[0] for _ in range(3)}
    assert len(homes) == 1
    shares = [routing().rank(f"adapter-{i}", IDLE)[0] for i in range(400)]
    assert all(60 <= shares.count(name) <= 140 for name in NAMES), shares


def test_a_loaded_home_is_passed_by() -> None:
    home = routing().rank("new", IDLE)[0]
    loads = {**IDLE, home: 6}
    assert routing().rank("new", loads)[0] != home


def test_a_replica_has_the_adapter_of_a_request_before_it_reports_so() -> None:
    router = routing()
    router.note_sent("new", "b")
    assert router.rank("new", {**IDLE, "b": 5})[0] == "b"
    router.take_report("b", ReplicaReport(num_slots=8))  # made before the request arrived
    assert router.rank("new", {**IDLE, "b": 5})[0] == "b"
    router.take_report("b", ReplicaReport(num_slots=8))  # it was evicted
    assert router.rank("new", {**IDLE, "b": 6})[0] != "b"


def test_memory_of_recent_requests_is_bounded() -> None:
    router = routing()
    for i in range(5 * MAX_RECENT):
        router.note_sent(f"adapter-{i}", "a")
    replica = router._replicas["a"]
    assert len(replica.sent) + len(replica.sent_before) <= 2 * MAX_RECENT


def test_a_replica_that_is_gone_is_forgotten() -> None:
    router = routing()
    router.keep_only(["a", "b"])
    assert "c" not in router
    assert "a" in router


def test_candidates_decide_which_replicas_are_returned() -> None:
    assert set(routing().rank("zh", {"b": 0, "new": None})) == {"b", "new"}
    assert routing().rank("zh", {}) == []


def test_a_report_survives_its_way_through_statistics() -> None:
    report = ReplicaReport(4, 2, bytes(Residents.of(["zh"])), b"")
    assert ReplicaReport.of_stats(report.to_stats()) == report
    assert ReplicaReport.of_stats({}) == ReplicaReport()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("base", ("base", "")),
        ("base:zh", ("base", "zh")),
        ("base:zh:2", ("base", "zh:2")),
        ("zh", ("", "zh")),
        ("base:b", ("base:b", "")),
        ("other:zh", ("", "other:zh")),
    ],
)
def test_a_models_name_is_divided_at_the_first_colon(name: str, parts: tuple[str, str]) -> None:
    assert model_and_adapter(name, ["base", "base:b"]) == parts
