"""A plan for several ranks has the numbers that a rank has when they run."""

from pathlib import Path

import msgspec
import pytest

from loraplex import LLM
from loraplex.app.plan import plan_memory
from loraplex.core.config import ModelConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_plan_is_what_a_start_has(num_ranks: int, tmp_path: Path) -> None:
    settings = {
        "tensor_parallel_size": num_ranks,
        "kv_cache_bytes": 8 << 20,
        "lora_device_bytes": 4 << 20,
        "max_lora_rank": 16,
    }
    path = str(ADAPTER_PATHS["chinese"])
    model = msgspec.convert({"path": str(BASE_PATH), **settings}, ModelConfig)
    plan = plan_memory(model, [path])
    (planned,) = plan.adapters.adapters
    assert not planned.problem
    with LLM(BASE_PATH, {"chinese": path}, state_dir=tmp_path, **settings) as llm:
        content = llm.adapter("chinese").content
    assert content is not None
    assert content.device_pages == planned.device_pages
    assert content.device_bytes == planned.device_bytes
    assert planned.device_bytes == content.device_pages * plan.memory.device.page_bytes
