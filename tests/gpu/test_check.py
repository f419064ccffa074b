"""The check of a first start on this card: of our kernels, and of one that ruins the context."""

from pathlib import Path
from typing import Any

import pytest

from loraplex.execution.checking.checker import check_ops
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from support.tiny_model import TinyCheckpoint

pytestmark = pytest.mark.gpu


def request(folder: Path, quantization: str = "none", **changes: Any) -> CheckRequest:
    TinyCheckpoint(
        folder,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    settings = RunnerSettings(
        device="cuda", dtype="bfloat16", max_lora_rank=16, quantization=quantization
    )
    return CheckRequest(folder=str(folder), settings=settings, **changes)


def test_our_kernels_agree_with_torch(tmp_path: Path) -> None:
    found = check_ops(request(tmp_path)).findings
    assert not [finding for finding in found if finding.fault is not None]
    assert {"add_lora", "paged_attention", "repeat"} <= {finding.op for finding in found}


def test_an_op_that_ruins_the_context_ends_its_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = check_ops(request(tmp_path, backend="support.planted_kernels:ruinous")).findings
    faults = {finding.op: finding.fault for finding in found if finding.fault is not None}
    assert faults == {"gate": Fault.CRASHES}


def test_sizes_are_measured(tmp_path: Path) -> None:
    """Which one is best depends on the card; all of them must be right."""
    found = check_ops(request(tmp_path, tunes=True, quantization="int4")).tuning
    assert not found.problems
    assert not found.not_done
    assert {one.name for one in found.measured} == {
        "decode",
        "few_rows",
        "many_rows",
        "attention_programs",
        "lora_splits",
    }
    assert all(one.ratio for one in found.measured)
