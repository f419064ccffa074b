"""Who goes when, what a failure costs, what is not run again."""

import itertools

import msgspec
import pytest
from comparison.calibration import best_variant
from comparison.cases import Case, Stage
from comparison.first_use import FirstUse
from comparison.fixture_tokenizer import FIRST_WORD_ID
from comparison.fixtures import Fixture
from comparison.fleet import Fleet
from comparison.held_streams import HeldStreams
from comparison.journal import (
    Calibrated,
    Checked,
    ComparisonSettings,
    Header,
    Journal,
    Measured,
    Started,
    Subject,
    read_journal,
)
from comparison.report import comparison_markdown, comparison_report
from comparison.runner import Comparison, TimeLimits
from comparison.shapes import ModelShape
from comparison.sizes import SHORT, STANDARD

from loraplex.bench.arrivals import Burst
from loraplex.bench.machine import Code, Machine
from loraplex.bench.popularity import BaseOnly, Distinct
from loraplex.bench.workload import Lengths, Workload
from loraplex.core.errors import ConfigError
from support.naming import naming

MIDGET = ModelShape(
    name="midget",
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=FIRST_WORD_ID + 700,
)
SETTINGS = ComparisonSettings(
    model="midget",
    num_parameters=1,
    groups=("W2", "W3"),
    rounds=2,
    num_threads=1,
    num_many=6,
    seed=0,
    is_restarting=False,
)


def case(name: str, popularity, num_requests: int = 3) -> Case:
    load = Workload(
        num_requests=num_requests,
        prompt_tokens=Lengths(8, 8),
        output_tokens=Lengths(3, 3),
        popularity=popularity,
        num_adapters=4,
        arrivals=Burst(),
        seed=0,
    )
    return Case(name=name, load=load)


STAGE = Stage(
    name="standard",
    num_adapters=4,
    num_resident=4,
    max_lora_rank=8,
    cases=(case("base", BaseOnly()), case("mixed", Distinct())),
)


class Log:
    def __init__(self) -> None:
        self.what: list[str] = []
        self.num_runs = self.num_done = 0

    def begin(self, num_runs: int) -> None:
        self.num_runs = num_runs

    def doing(self, what: str) -> None:
        self.what.append(what)

    def done(self) -> None:
        self.num_done += 1


def header(systems, settings=SETTINGS, commit="a") -> Header:
    return Header(
        created="2030-01-02T03:04:05+00:00",
        code=Code(version="0.1.0", commit=commit, is_modified=False),
        machine=Machine(
            cpu_model="Abacus",
            num_cores=2,
            memory_bytes=4 << 30,
            system="Linux",
            python="3.11",
            load_average=0.0,
        ),
        settings=settings,
        subjects=tuple(
            Subject(
                name=system.name,
                weights=system.weights,
                weight_bits=system.weight_bits,
                is_http=True,
                mixes_adapters=True,
                version=system.version(),
            )
            for system in systems
        ),
    )


@pytest.fixture(autouse=True)
def no_idling(monkeypatch):
    monkeypatch.setattr("comparison.fleet._IDLE_SECONDS", 0.001)
    monkeypatch.setattr("comparison.fleet._SETTLE_SECONDS", 0.001)


@pytest.fixture
def compare(tmp_path):
    """An async function (systems, stages, **changes) -> (Journal, Log)."""

    async def compare(
        systems,
        *wanted,
        budget=None,
        run_seconds=30.0,
        reference=None,
        sizes=STANDARD,
        **changes,
    ):
        settings = msgspec.structs.replace(SETTINGS, **changes)
        journal = Journal.open(tmp_path / "journal.jsonl", header(systems, settings))
        log = Log()
        comparison = Comparison(
            systems,
            Fixture(MIDGET, tmp_path / "fixtures"),
            journal,
            limits=TimeLimits(run_seconds, budget),
            progress=log,
            work=tmp_path / "work",
            reference=reference,
            sizes=sizes,
        )
        await comparison.run(wanted or (STAGE,))
        variants = [each for system in systems for each in system.variants.values()]
        assert all(system.num_up == 0 for system in [*systems, *variants])
        return read_journal(tmp_path / "journal.jsonl"), log

    return compare


async def test_waits_until_no_system_computes(monkeypatch, tmp_path):
    used = iter([0.0, 0.1, 0.1, 0.2, 0.2, 0.2])  # busy in two pauses, idle in the third
    monkeypatch.setattr("comparison.fleet.cpu_seconds", lambda roots: next(used))
    await Fleet("standard", None, tmp_path, None).settle()
    assert next(used, None) is None


async def test_a_system_that_is_never_idle_is_not_waited_for(monkeypatch, tmp_path):
    used = itertools.count()
    monkeypatch.setattr("comparison.fleet.cpu_seconds", lambda roots: next(used))
    await Fleet("standard", None, tmp_path, None).settle()
    assert next(used) == 2 * 25


async def test_each_run_waits_for_other_systems(compare, fake_system, monkeypatch):
    system, num_sent = fake_system("loraplex fp32"), []

    async def settle(fleet):
        num_sent.append(len(system.sent))

    monkeypatch.setattr(Fleet, "settle", settle)
    await compare([system], rounds=1)
    base, mixed = num_sent
    assert mixed == base + 3
    assert len(system.sent) == mixed + 3


async def test_systems_take_turns_and_change_places(compare, fake_system):
    systems = [fake_system("loraplex fp32"), fake_system("peer f32")]
    journal, log = await compare(systems)
    assert log.what == [
        *("base, loraplex fp32", "base, peer f32", "mixed, loraplex fp32", "mixed, peer f32"),
        *("base, peer f32", "base, loraplex fp32", "mixed, peer f32", "mixed, loraplex fp32"),
    ]
    assert log.num_done == log.num_runs == 8
    assert [len(system.starts) for system in systems] == [1, 1]
    runs = [*journal.of(Measured)]
    assert all(run.is_good for run in runs)
    assert {run.figures.num_output_tokens for run in runs} == {9}
    assert {run.adapter_loads for run in runs} == {3.0}


async def test_restarting_has_one_system_up_at_a_time(compare, fake_system):
    systems = [fake_system("loraplex fp32"), fake_system("peer f32")]
    highest = []

    for system in systems:
        start = system.start

        async def watched(setup, start=start):
            running = await start(setup)
            highest.append(sum(each.num_up for each in systems))
            return running

        system.start = watched
    _, log = await compare(systems, is_restarting=True)
    assert log.what[:4] == [
        *("base, loraplex fp32", "mixed, loraplex fp32", "base, peer f32", "mixed, peer f32")
    ]
    assert log.what[4:] == [
        *("base, peer f32", "mixed, peer f32", "base, loraplex fp32", "mixed, loraplex fp32")
    ]
    assert max(highest) == 1


async def test_the_first_start_of_a_large_model_is_three(compare, fake_system, monkeypatch):
    dropped = []
    monkeypatch.setattr("comparison.fleet.drop_from_page_cache", dropped.append)
    monkeypatch.setattr("comparison.page_cache._QUIET_SECONDS", 0.001)
    systems = [fake_system("loraplex fp32"), fake_system("peer f32")]
    journal, _ = await compare(systems, sizes=SHORT, is_restarting=True)
    # The peer stays up from the end of the first round to the second one, which it begins.
    for system, later in zip(systems, ([""], []), strict=True):
        kinds = [entry.kind for entry in journal.of(Started) if entry.system == system.name]
        assert kinds == ["first", "cold", "warm", *later]
        assert len({setup.log for setup in system.starts}) == len(kinds)
    assert len(dropped) == 2
    # The check is the short one: the base and two adapters, alone and twice together.
    assert [entry.verdict.num_asked for entry in journal.of(Checked)] == [6, 6]
    assert all(setup.max_num_seqs == 32 for system in systems for setup in system.starts)


async def test_streams_are_held_step_by_step(compare, fake_system):
    load = HeldStreams(prompt_tokens=4, output_tokens=3, rungs=(1, 2))
    stage = msgspec.structs.replace(STAGE, cases=(Case(name="held", load=load),))
    journal, _ = await compare([fake_system()], stage, rounds=1)
    (run,) = journal.of(Measured)
    assert run.is_good
    assert run.held.rungs[0].num_streams == 1


async def test_all_systems_get_the_same_requests_and_no_prompt_twice(compare, fake_system):
    systems = [fake_system("loraplex fp32"), fake_system("peer f32")]
    await compare(systems)
    sent = [sorted(map(repr, system.sent)) for system in systems]
    assert sent[0] == sent[1]
    timed = [r.prompt_token_ids for r in systems[0].sent if r.num_output_tokens == 3]
    assert len(timed) == len(set(timed)) == 12


async def test_a_wrong_system_is_reported_and_not_timed_with_adapters(compare, fake_system):
    liar = fake_system("peer f32", mix=lambda adapters, position: adapters[0])
    journal, _ = await compare([fake_system(), liar])
    assert [entry.verdict.is_right for entry in journal.of(Checked)] == [True, False]
    runs = [run for run in journal.of(Measured) if run.system == "peer f32"]
    assert [(run.case, run.is_good) for run in runs] == [
        ("base", True),
        ("mixed", False),
        ("base", True),
        ("mixed", False),
    ]
    assert "not timed, its outputs are wrong" in runs[1].error


async def test_the_reference_runs_first(compare, fake_system):
    peer = fake_system("transformers + peft f32")
    wrong = fake_system(
        "loraplex fp32", noise=lambda adapter, text, size: text if adapter != 2 else text[::-1]
    )
    journal, _ = await compare([wrong, peer], reference=peer)
    verdicts = {entry.system: entry.verdict for entry in journal.of(Checked)}
    assert verdicts["transformers + peft f32"].is_right
    assert verdicts["loraplex fp32"].is_compared_with_reference
    assert verdicts["loraplex fp32"].problems == (
        "adapter 2 alone differs from the reference at token 1",
    )


async def test_without_its_reference_it_goes_on(compare, fake_system):
    peer = fake_system("transformers + peft f32")
    peer.start_failures = [ConfigError("no torch")] * 9
    journal, _ = await compare([fake_system(), peer], reference=peer)
    [checked] = journal.of(Checked)
    assert checked.verdict.is_right
    assert not checked.verdict.is_compared_with_reference


async def test_a_crash_costs_its_own_runs_only_and_the_system_comes_back(compare, fake_system):
    peer = fake_system("peer f32")
    [honest] = [fake_system()]
    original = peer.start

    async def start(setup):
        running = await original(setup)
        if len(peer.starts) == 1:
            peer.failures = [RuntimeError("segmentation fault")]
        return running

    peer.start = start
    journal, _ = await compare([honest, peer])
    runs = [run for run in journal.of(Measured) if run.system == "peer f32"]
    assert [run.is_good for run in runs] == [False, True, True, True]
    assert "segmentation fault" in runs[0].error
    assert len(peer.starts) == 2
    assert all(run.is_good for run in journal.of(Measured) if run.system == "loraplex fp32")


async def test_what_never_starts_is_left_alone(compare, fake_system):
    peer = fake_system("peer f32")
    peer.start_failures = [ConfigError("no such library")] * 9
    journal, log = await compare([fake_system(), peer])
    errors = [run.error for run in journal.of(Measured) if run.system == "peer f32"]
    assert errors[:2] == ["no such library"] * 2
    assert errors[2:] == ["peer f32 failed 2 times and is left alone"] * 2
    assert len(peer.start_failures) == 7
    assert log.num_done == 8


async def test_too_slow_a_run_is_ended(compare, fake_system):
    slow = fake_system()
    slow.seconds_per_token = 10.0
    journal, _ = await compare([slow], run_seconds=0.05)
    assert "not done within 0.05 seconds" in next(journal.of(Measured)).error


async def test_it_goes_on_where_it_was(compare, fake_system, tmp_path):
    peer = fake_system("peer f32")
    peer.start_failures = [ConfigError("not yet")] * 2
    first, _ = await compare([fake_system(), peer])
    assert sum(run.is_good for run in first.of(Measured)) == 4
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"type":"measured","sys')
    ours = fake_system()
    again, log = await compare([ours, peer])
    assert not ours.starts
    assert {what.partition(", ")[2] for what in log.what} == {"peer f32"}
    assert log.num_done == 8
    assert all(
        again.measured(name, "standard", case, number).is_good
        for name in ("loraplex fp32", "peer f32")
        for case in ("base", "mixed")
        for number in (0, 1)
    )


async def test_every_start_has_a_log_of_its_own(compare, fake_system):
    """A log that shows readiness must not contain that of an earlier start."""
    system = fake_system()
    for failures in ([RuntimeError("crash")] * 2, [RuntimeError("crash")]):
        system.failures = failures
        await compare([system])
    logs = [setup.log for setup in system.starts]
    assert len(logs) == len(set(logs)) >= 4
    assert all(setup.work.name == setup.log.stem for setup in system.starts)


async def test_no_run_begins_after_the_budget(compare, fake_system):
    journal, log = await compare([fake_system()], budget=0.0)
    assert log.what == []
    assert not [*journal.of(Measured)]


async def test_first_uses_are_of_new_or_of_forgotten_adapters(compare, fake_system):
    system = fake_system()
    stage = Stage(
        name="first use",
        num_adapters=0,
        num_resident=8,
        max_lora_rank=64,
        cases=tuple(
            Case(name=f"W5-{is_known}", load=FirstUse(rank=8, is_known=is_known))
            for is_known in (False, True)
        ),
    )
    journal, _ = await compare([system], stage, rounds=1)
    assert system.log == [
        *("add r8-10000", "remove 0"),
        *("add r8-10001", "remove 1", "add r8-10001", "remove 2"),
    ]
    for run in journal.of(Measured):
        assert 0 < run.first_use.register_seconds < run.first_use.cold_seconds < 1
    assert not [*journal.of(Checked)]
    assert len([*journal.of(Started)]) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"commit": "b"}, ("commit", "b")),
        ({"settings": 1}, ("settings", "rounds=9", "num_parameters=1")),
    ],
)
def test_another_comparison_is_not_mixed_in(tmp_path, fake_system, change, named):
    path = tmp_path / "journal.jsonl"
    Journal.open(path, header([fake_system()]))
    if "settings" in change:
        change = {"settings": msgspec.structs.replace(SETTINGS, rounds=9)}
    with pytest.raises(ConfigError, match=naming(*named)):
        Journal.open(path, header([fake_system()], **change))


@pytest.mark.parametrize(
    ("content", "named"),
    [("", ("journal.jsonl",)), ("nonsense\n{}", (1,))],
)
def test_what_is_no_journal_is_said(tmp_path, content, named):
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=naming(*named)):
        read_journal(path)


def with_variants(fake_system, **seconds_per_token):
    """A system of name "peer f32" with variants of these speeds; the values are the starts."""
    peer = fake_system("peer f32")
    peer.variants = {name: fake_system("peer f32") for name in seconds_per_token}
    for name, seconds in seconds_per_token.items():
        peer.variants[name].seconds_per_token = seconds
    return peer


async def test_the_fastest_variant_is_measured(compare, fake_system):
    peer = with_variants(fake_system, default=0.004, sleepy=0.002, keen=0.0, broken=0.0)
    peer.variants["broken"].start_failures = [ConfigError("no such build")] * 9
    ours = fake_system()
    journal, _ = await compare([ours, peer])
    tried = {entry.variant: entry for entry in journal.of(Calibrated)}
    assert [*tried] == ["default", "sleepy", "keen", "broken"]
    assert tried["broken"].error == "no such build"
    assert tried["keen"].tokens_per_second.keys() == {"W1", "W2-8"}
    assert best_variant(tried.values(), "peer f32") == "keen"
    # One start to try each, and one of the chosen to measure it; a system without a choice has one.
    starts = {name: len(variant.starts) for name, variant in peer.variants.items()}
    assert starts == {"default": 1, "sleepy": 1, "keen": 2, "broken": 0}
    assert len(ours.starts) == 1
    text = comparison_markdown(comparison_report(journal))
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| peer f32 ")]
    assert {row[2].strip(): row[5].strip() for row in rows} == {
        "default": "",
        "sleepy": "",
        "keen": "chosen",
        "broken": "no such build",
    }


async def test_only_the_variants_that_are_wanted_are_tried(compare, fake_system):
    peer = with_variants(fake_system, default=0.0, slow=0.002, quick=0.0)
    journal, _ = await compare([peer], variants=("slow", "quick", "of another system"))
    assert [entry.variant for entry in journal.of(Calibrated)] == ["slow", "quick"]
    assert not peer.variants["default"].starts


async def test_a_single_wanted_variant_is_measured_untried(compare, fake_system):
    peer = with_variants(fake_system, default=0.0, other=0.0)
    journal, _ = await compare([peer], variants=("other",))
    assert not [*journal.of(Calibrated)]
    assert len(peer.variants["other"].starts) == 1


async def test_variants_are_tried_once(compare, fake_system):
    await compare([with_variants(fake_system, slow=0.002, quick=0.0)])
    again = with_variants(fake_system, slow=0.0, quick=0.0)
    await compare([again])
    assert not any(variant.starts for variant in again.variants.values())


async def test_without_figures_the_default_is_measured(compare, fake_system):
    peer = with_variants(fake_system, default=0.0, other=0.0)
    for variant in peer.variants.values():
        variant.start_failures = [ConfigError("not yet")]
    journal, _ = await compare([peer])
    assert [entry.error for entry in journal.of(Calibrated)] == ["not yet"] * 2
    assert len(peer.variants["default"].starts) == 1
    assert not peer.variants["other"].starts
