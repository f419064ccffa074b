"""The check of a first start on this card: of our kernels, and of one that ruins the context."""

from pathlib import Path

import pytest

from loraplex.execution.checking.checker import check_ops
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from support.tiny_model import TinyCheckpoint

pytestmark = pytest.mark.gpu


def request(folder: Path, **changes: str) -> CheckRequest:
    TinyCheckpoint(
        folder,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=512,
    )
    settings = RunnerSettings(device="cuda", dtype="bfloat16", max_lora_rank=16)
    return CheckRequest(folder=str(folder), settings=settings, **changes)


def test_our_kernels_agree_with_torch(tmp_path: Path) -> None:
    found = check_ops(request(tmp_path))
    assert not [finding for finding in found if finding.fault is not None]
    assert {"add_lora", "paged_attention", "repeat"} <= {finding.op for finding in found}


def test_an_op_that_ruins_the_context_ends_its_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = check_ops(request(tmp_path, backend="support.planted_kernels:ruinous"))
    faults = {finding.op: finding.fault for finding in found if finding.fault is not None}
    assert faults == {"gate": Fault.CRASHES}
