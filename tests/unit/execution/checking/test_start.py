"""A verdict is kept, taken by the next start, and decides which ops torch computes."""

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.checking import start
from loraplex.execution.checking.checker import CheckFailed
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.checking.start import find_verdict, start_verdict, verdict_folder
from loraplex.execution.checking.verdict import Finding, Verdict, VerdictFolder, place_of
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
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

    def __call__(self, request: CheckRequest) -> tuple[Finding, ...]:
        self.backends.append(request.settings.attention_backend)
        return self._findings[request.settings.attention_backend]


def find(folder: Path, check: Callable[[CheckRequest], tuple[Finding, ...]], **changes) -> Verdict:
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
    def fails(_: CheckRequest) -> tuple[Finding, ...]:
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


def test_where_flashinfer_falls_triton_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace())
    checks = Checks(auto=BROKEN, triton=SOUND)
    verdict = find(tmp_path, checks)
    assert checks.backends == ["auto", "triton"]
    assert verdict.attention_backend == "triton"
    assert not verdict.fallen


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
    return verdict_folder()


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
