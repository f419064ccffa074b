"""Adapters come and go while an engine decodes: no token changes."""

from pathlib import Path

import pytest

from loraplex.execution.sizing.settings import RunnerSettings
from support.adapter_churn import AdapterChurn
from support.tiny_model import TinyCheckpoint


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_no_token_is_another(tmp_path: Path, overlap: bool) -> None:
    settings = RunnerSettings(
        dtype="float32",
        num_blocks=60,
        max_num_seqs=6,
        max_lora_rank=4,
        optimal_lora_rank=2,
        lora_device_bytes=80_000,
    )
    folder = TinyCheckpoint(tmp_path, hidden_size=32).save()
    churn = AdapterChurn(folder, settings, 12, overlap=overlap)
    report = churn.run(300, num_running=5)
    churn.close()
    assert report.wrong == []
    assert report.num_completions > 20
    assert report.device_evictions > 10
