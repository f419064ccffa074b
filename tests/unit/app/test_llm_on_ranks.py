"""The library on several ranks: whole arrays of adapters, and plans with one rank's numbers."""

import msgspec
import numpy as np
import pytest

from loraplex import LLM, SamplingParams
from loraplex.adapters.formats.export import StorageType
from loraplex.app.plan import plan_memory
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.core.config import ModelConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH

PROMPT = "What is the capital of France?"
OUTPUTS = {"chinese": "巴黎", "japanese": "パリ"}
SETTINGS = {"tensor_parallel_size": 2, "kv_cache_bytes": 8 << 20, "lora_device_bytes": 4 << 20}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=tmp_path_factory.mktemp("s"), **SETTINGS) as llm:
        yield llm


def test_arrays_of_tensorrt_llm_are_for_all_ranks(llm, tmp_path):
    """A client sends `lora_weights` whole, whatever the ranks are; each keeps its part."""
    for task_id, (language, expected) in enumerate(OUTPUTS.items()):
        folder = tmp_path / language
        write_pair(read_peft(str(ADAPTER_PATHS[language])).rows, folder, StorageType.FLOAT16)
        arrays = {
            f"lora_{kind}": np.load(folder / f"model.lora_{kind}.npy")
            for kind in ("weights", "config")
        }
        greedy = SamplingParams(max_tokens=24, temperature=0)
        for sent in (arrays, {}):
            (output,) = llm.generate([PROMPT], greedy, lora_task_id=task_id, **sent)
            assert output.text.strip() == expected


def test_a_plan_has_what_a_rank_holds(llm):
    paths = {name: str(path) for name, path in ADAPTER_PATHS.items()}
    plans = [
        plan_memory(
            msgspec.convert({"path": str(BASE_PATH), **SETTINGS} | changes, ModelConfig),
            list(paths.values()),
        )
        for changes in ({}, {"tensor_parallel_size": 1})
    ]
    for planned, whole in zip(*(plan.adapters.adapters for plan in plans), strict=True):
        assert not planned.problem
        (name,) = (name for name, path in paths.items() if path == planned.path)
        content = llm.adapter(name).content
        assert content is not None
        assert content.device_pages == planned.device_pages
        assert content.device_bytes == planned.device_bytes < whole.device_bytes
    assert plans[0].memory.weights_bytes < plans[1].memory.weights_bytes


def test_a_plan_of_a_pipeline_is_that_of_the_stage_with_most_weights():
    plans = {
        number: plan_memory(
            msgspec.convert(
                {"path": str(BASE_PATH), "pipeline_parallel_size": number}, ModelConfig
            ),
            [str(ADAPTER_PATHS["chinese"])],
        )
        for number in (1, 2)
    }
    whole, half = (plan.memory.weights_bytes for plan in plans.values())
    assert whole / 2 <= half < whole
    for plan in plans.values():
        assert [adapter.problem for adapter in plan.adapters.adapters] == [""]
