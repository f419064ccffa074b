"""A verdict is kept, taken by the next start, and decides which ops torch computes."""

import errno
import fcntl
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from loraplex.core.sampling_params import SamplingParams
from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.checking import start
from loraplex.execution.checking.checker import CheckFailed, CheckResult
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.checking.start import find_verdict, start_verdict, verdict_folder
from loraplex.execution.checking.tuning import Measured, Tuning
from loraplex.execution.checking.verdict import Finding, Verdict, VerdictFolder, place_of
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.shadow import Fault
from loraplex.models.sharding import WHOLE
from support.step_driver import Prompt, StepDriver
from support.tiny_model import TinyCheckpoint

SETTINGS = RunnerSettings(device="cpu", kernel_check="on", max_num_seqs=4)
SOUND = (Finding(op="linear", num_calls=3), Finding(op="rotary", num_calls=3))
BROKEN = (
    Finding(op="linear", num_calls=3),
    Finding(op="paged_attention", fault=Fault.WRONG, detail="differs"),
    Finding(op="rms_norm", fault=Fault.HANGS, detail="did nothing for 90 seconds"),
)


class Checks:
    """Stands for a check; the findings by the backend of attention."""

    def __init__(self, **findings: tuple[Finding, ...]) -> None:
        self._findings = findings
        self.backends: list[str] = []

    def __call__(self, request: CheckRequest) -> CheckResult:
        self.backends.append(request.settings.attention_backend)
        return CheckResult(self._findings[request.settings.attention_backend])


class Tunings:
    """Stands for checks with a tuning, and for that of the sizes that it chose."""

    def __init__(self, of_chosen: tuple[Finding, ...] | CheckFailed = SOUND) -> None:
        self._of_chosen = of_chosen
        self.requests: list[CheckRequest] = []

    def __call__(self, request: CheckRequest) -> CheckResult:
        self.requests.append(request)
        if not request.sizes:
            return CheckResult(SOUND, Tuning(sizes={"lora_splits": "16"}))
        if isinstance(self._of_chosen, CheckFailed):
            raise self._of_chosen
        return CheckResult(self._of_chosen)


def find(folder: Path, check: Callable[[CheckRequest], CheckResult], **changes) -> Verdict:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    spec = windowed(settings, TinyCheckpoint(folder).config)
    return find_verdict(folder, settings, spec, WHOLE, VerdictFolder(folder / "k"), check=check)


def test_a_check_is_done_once_for_a_place(tmp_path: Path) -> None:
    checks = Checks(auto=SOUND)
    first = find(tmp_path, checks)
    assert find(tmp_path, checks) == first
    assert first.findings == SOUND
    assert len(checks.backends) == 1
    # Another data type has other kernels.
    find(tmp_path, checks, dtype="bfloat16")
    assert len(checks.backends) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"place": 3}'])
def test_a_broken_file_is_checked_again(tmp_path: Path, content: bytes) -> None:
    checks = Checks(auto=SOUND)
    find(tmp_path, checks)
    (file,) = (tmp_path / "k").glob("*.json")
    file.write_bytes(content)
    assert find(tmp_path, checks).findings == SOUND
    assert len(checks.backends) == 2


def test_a_failed_check_is_not_kept(tmp_path: Path) -> None:
    def fails(_: CheckRequest) -> CheckResult:
        raise CheckFailed("no memory")

    with pytest.raises(CheckFailed):
        find(tmp_path, fails)
    assert find(tmp_path, Checks(auto=SOUND)).findings == SOUND


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "k").write_text("a file in place of the folder")
    assert find(tmp_path, Checks(auto=SOUND)).findings == SOUND
    assert "cannot be kept" in caplog.text


def test_a_verdict_that_cannot_be_renamed_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find(tmp_path, Checks(auto=SOUND))
    (file,) = (tmp_path / "k").glob("*.json")
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    assert find(tmp_path, Checks(auto=SOUND)).findings == SOUND
    assert "cannot be kept" in caplog.text
    assert {path.name for path in (tmp_path / "k").iterdir()} == {file.name, f"{file.stem}.lock"}


def test_where_there_are_no_locks_a_start_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert find(tmp_path, Checks(auto=SOUND)).findings == SOUND


def test_where_flashinfer_falls_triton_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace())
    checks = Checks(auto=BROKEN, triton=SOUND)
    verdict = find(tmp_path, checks)
    assert checks.backends == ["auto", "triton"]
    assert verdict.attention_backend == "triton"
    assert not verdict.fallen


def test_chosen_sizes_are_checked_and_kept(tmp_path: Path) -> None:
    checks = Tunings()
    first = find(tmp_path, checks)
    assert first.tuning.sizes == {"lora_splits": "16"}
    assert [request.sizes for request in checks.requests] == [{}, {"lora_splits": "16"}]
    assert find(tmp_path, checks) == first
    assert len(checks.requests) == 2


def test_a_gpu_alone_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Tunings()
    find(tmp_path, checks)
    assert [request.tunes for request in checks.requests] == [False, False]
    monkeypatch.setattr(start, "place_of", lambda *_: {"device": "a card"})
    find(tmp_path, checks, device="cuda")
    assert [request.tunes for request in checks.requests[2:]] == [True, False]


@pytest.mark.parametrize(
    ("of_chosen", "expected"),
    [
        (BROKEN, "with them paged_attention, rms_norm failed"),
        (CheckFailed("the device is full"), "they could not be checked: the device is full"),
    ],
)
def test_sizes_that_fail_the_check_are_not_used(
    tmp_path: Path, of_chosen: tuple[Finding, ...] | CheckFailed, expected: str
) -> None:
    found = find(tmp_path, Tunings(of_chosen))
    assert found.findings == SOUND
    assert found.tuning.sizes == {}
    assert found.tuning.not_done == f"lora_splits: 16 are not used: {expected}"


def test_sizes_that_cannot_be_kept_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("a file in place of the folder")
    found = find(tmp_path, Tunings())
    assert found.tuning.sizes == {}
    assert "the result cannot be kept" in found.tuning.not_done


@pytest.mark.parametrize(
    ("device", "kernel_check", "expected"),
    [
        ("cpu", "auto", False),
        ("cpu", "on", True),
        ("cuda", "auto", True),
        ("cuda:1", "auto", True),
        ("cuda", "off", False),
    ],
)
def test_a_start_checks_a_gpu_by_default(device: str, kernel_check: str, expected: bool) -> None:
    assert start.is_checked(kernel_check, torch.device(device)) is expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerdictFolder:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return verdict_folder(SETTINGS)


def tokens_of(folder: Path, settings: RunnerSettings) -> list[list[int]]:
    runner = load_runner(folder, settings, HostAdapters())
    prompts = [Prompt((1, 2, 3, 4)), Prompt((7,) * 20, (), SamplingParams(temperature=0.0))]
    tokens = StepDriver(runner).generate(prompts, 6)
    runner.close()
    return tokens


def test_a_server_computes_fallen_ops_by_torch(
    tmp_path: Path, cache: VerdictFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = TinyCheckpoint(tmp_path).save()
    spec = windowed(SETTINGS, TinyCheckpoint(tmp_path).config)
    repeat = Finding(op="repeat", fault=Fault.RAISES, detail="AssertionError")
    linear = Finding(op="grouped_linear", fault=Fault.CRASHES, detail="killed")
    cache.keep(
        Verdict(
            place=place_of(SETTINGS, spec),
            findings=(*BROKEN, repeat, linear),
            attention_backend="auto",
            seconds=1.0,
        )
    )
    off = msgspec.structs.replace(SETTINGS, kernel_check="off")
    expected = tokens_of(folder, off)
    caplog.set_level(logging.WARNING)
    assert tokens_of(folder, SETTINGS) == expected
    lines = [text for text in caplog.messages if text.startswith("kernel ")]
    assert len(lines) == 4
    assert "kernel paged_attention is wrong on this device: torch computes it instead" in lines[0]
    assert "op rms_norm hangs: did nothing for 90 seconds (device cpu, loraplex" in lines[1]
    assert "steps are computed op by op" in lines[2]


def test_a_server_has_the_sizes_of_the_verdict(
    tmp_path: Path,
    cache: VerdictFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = TinyCheckpoint(tmp_path).save()
    spec = windowed(SETTINGS, TinyCheckpoint(tmp_path).config)
    failing = Measured(name="decode", size="16x64", problem="differs")
    cache.keep(
        Verdict(
            place=place_of(SETTINGS, spec),
            findings=SOUND,
            attention_backend="auto",
            seconds=1.0,
            tuning=Tuning(sizes={"lora_splits": "16"}, measured=(failing,), not_done="no time"),
        )
    )
    requested = []

    def select(*arguments: object, sizes: dict[str, str], **options: object) -> Kernels:
        requested.append(sizes)
        return select_kernels(*arguments, **options)

    monkeypatch.setattr(loading, "select_kernels", select)
    caplog.set_level(logging.INFO)
    tokens_of(folder, SETTINGS)
    tokens_of(folder, msgspec.structs.replace(SETTINGS, kernel_check="off"))
    assert requested == [{"lora_splits": "16"}, {}]
    assert "sizes that are faster on this device: lora_splits: 16" in caplog.messages
    assert "sizes of programs: no time" in caplog.messages
    (warning,) = [text for text in caplog.messages if "report this line" in text]
    assert "size decode 16x64: differs (device cpu" in warning


def test_what_cannot_be_checked_is_used_and_reported(
    tmp_path: Path,
    cache: VerdictFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> Verdict:
        raise CheckFailed("the device is full")

    monkeypatch.setattr(start, "find_verdict", fails)
    spec = windowed(SETTINGS, TinyCheckpoint(tmp_path).config)
    assert start_verdict(tmp_path, SETTINGS, spec, WHOLE, torch.device("cpu")) is None
    assert "are used as they are: the device is full" in caplog.text
