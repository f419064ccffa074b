"""A check finds ops that are wrong, raise, hang and crash, and goes on to the end."""

from pathlib import Path

import msgspec
import pytest

from loraplex.execution.checking.checker import CheckFailed, CheckResult, check_ops
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from loraplex.kernels.sizes import CANDIDATES
from support.encoder_decoders import CASES, save_case
from support.planted_kernels import FAULTS
from support.tiny_model import TinyCheckpoint

TESTS = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return TinyCheckpoint(tmp_path).folder


def request_of(folder: Path, backend: str) -> CheckRequest:
    return CheckRequest(
        folder=str(folder),
        settings=RunnerSettings(device="cpu"),
        backend=f"support.planted_kernels:{backend}",
        num_threads=1,
    )


def patient(op: str) -> float:
    return 600.0


def impatient(op: str) -> float:
    """Wait little for the op that is planted to hang, and for no other."""
    return 0.5 if op == "rotary" else 600.0


def test_each_fault_is_found_and_the_rest_is_checked(folder: Path) -> None:
    found = {
        finding.op: finding
        for finding in check_ops(request_of(folder, "faulty"), impatient).findings
    }
    assert {op: finding.fault for op, finding in found.items() if finding.fault} == {
        "gate": Fault.WRONG,
        "linear": Fault.RAISES,
        "rotary": Fault.HANGS,
        "add_rms_norm": Fault.CRASHES,
    }
    assert set(FAULTS) == {op for op, finding in found.items() if finding.fault}
    assert found["linear"].detail == "RuntimeError: out of resource: shared memory"
    assert found["rotary"].detail == "did nothing for 0.5 seconds"
    assert found["add_rms_norm"].detail == "the process was killed by SIGSEGV"
    assert "differs by 0.2 of the largest number" in found["gate"].detail
    passed = {op for op, finding in found.items() if finding.fault is None}
    assert passed >= {"rms_norm", "paged_attention", "write_kv", "add_lora", "draw_tokens"}
    assert found["repeat"].num_calls > 0


def test_a_sound_backend_has_no_fault(folder: Path) -> None:
    found = check_ops(request_of(folder, "sound"), patient).findings
    assert not [finding for finding in found if finding.fault]
    assert max(finding.difference for finding in found) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flan-t5", "bart"])
def test_encoders_are_checked(folder: Path, tmp_path: Path, name: str) -> None:
    """The encoder's attention sees later positions, and cross attention those of an input."""
    save_case(tmp_path / name, CASES[name])
    found = check_ops(request_of(tmp_path / name, "sound"), patient).findings
    assert not [finding for finding in found if finding.fault]
    if name == "bart":
        return
    found = check_ops(request_of(tmp_path / name, "without_biases"), patient).findings
    (wrong,) = (finding for finding in found if finding.fault)
    assert (wrong.op, wrong.fault) == ("paged_attention", Fault.WRONG)


def test_a_check_that_cannot_start_says_why(folder: Path) -> None:
    with pytest.raises(CheckFailed, match="KeyError: 'no kernels here'"):
        check_ops(request_of(folder, "starts_badly"), patient)


def test_a_process_that_does_not_start_in_time_is_no_fault_of_an_op(folder: Path) -> None:
    with pytest.raises(CheckFailed, match="did nothing for 0 seconds, after its start"):
        check_ops(request_of(folder, "sound"), lambda _: 0.0)


def tuned(folder: Path, backend: str, measure: str = "work_done") -> CheckResult:
    request = msgspec.structs.replace(
        request_of(folder, backend), tunes=True, measure=f"support.planted_kernels:{measure}"
    )
    return check_ops(request, patient)


def test_sizes_are_measured_after_the_check(folder: Path) -> None:
    slow, quick = map(str, CANDIDATES["many_rows"])
    wrong, raising = map(str, CANDIDATES["attention_programs"])
    found = tuned(folder, "with_sizes")
    assert not [finding for finding in found.findings if finding.fault]
    assert found.tuning.sizes == {"many_rows": quick}
    results = {(one.name, one.size): (one.ratio, one.problem) for one in found.tuning.measured}
    assert results["many_rows", slow] == (3.0, "")
    assert results["many_rows", quick] == (0.5, "")
    assert "differs by" in results["attention_programs", wrong][1]
    assert results["attention_programs", raising][1].endswith("out of resource: shared memory")


def test_of_a_tuning_that_ends_its_process_nothing_is_used(folder: Path) -> None:
    found = tuned(folder, "with_a_size_that_crashes")
    assert not [finding for finding in found.findings if finding.fault]
    assert found.tuning.sizes == {}
    assert "gate with attention_programs 4 crashes" in found.tuning.not_done


def test_a_measurement_that_cannot_start_leaves_the_check_as_it_is(folder: Path) -> None:
    found = tuned(folder, "sound", measure="no_such_measurer")
    assert not [finding for finding in found.findings if finding.fault]
    assert found.findings
    assert found.tuning.not_done.startswith("AttributeError: ")
