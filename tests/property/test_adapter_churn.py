"""Adapters come and go while an engine decodes: no token changes."""

from pathlib import Path
from typing import Any

import pytest

from loraplex.execution.sizing.settings import RunnerSettings
from support.adapter_churn import AdapterChurn
from support.tiny_model import TinyCheckpoint

EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        pytest.param({}, True, id="dense-overlap"),
        pytest.param(EXPERTS, False, id="experts"),
        pytest.param({}, False, id="dense", marks=pytest.mark.slow),
        pytest.param(EXPERTS, True, id="experts-overlap", marks=pytest.mark.slow),
    ],
)
def test_no_token_is_another(tmp_path: Path, config: dict[str, Any], overlap: bool) -> None:
    settings = RunnerSettings(
        dtype="float32",
        num_blocks=60,
        max_num_seqs=6,
        max_lora_rank=4,
        optimal_lora_rank=2,
        lora_device_bytes=80_000,
    )
    folder = TinyCheckpoint(tmp_path, hidden_size=32, **config).save()
    churn = AdapterChurn(folder, settings, 12, overlap=overlap)
    report = churn.run(300, num_running=5)
    churn.close()
    assert report.wrong == []
    assert report.num_completions > 20
    assert report.device_evictions > 10
