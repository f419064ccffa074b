"""Everything that can be asked of an engine, under all conditions: the answers are those alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.execution.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.runner_settings import RunnerSettings
from loraplex.testing.feature_requests import LONGEST_PROMPT
from loraplex.testing.feature_schedules import FeatureSchedules
from loraplex.testing.grammar_tokens import VOCAB_SIZE
from loraplex.testing.tiny_model import TinyCheckpoint

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 160,
}
WINDOW = {"max_attention_window_size": (9, 23), "sink_token_length": 3}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "window": {"dtype": "float32", **WINDOW},
    "window-int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8", **WINDOW},
}
NUM_QUICK = 40
NUM_SLOW = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_schedules(folder: Path, model: str) -> FeatureSchedules:
    checkpoint = TinyCheckpoint(folder, **SHAPE)
    # Logits as flat as those of trained models, so that a draw has choices.
    checkpoint.tensors["lm_head.weight"] /= 6
    settings = RunnerSettings(
        block_size=4,
        num_blocks=400,
        max_num_seqs=8,
        max_lora_rank=8,
        kv_cache_host_memory_bytes=1 << 20,
        **MODELS[model],
    )
    parts = load_parts(checkpoint.save(), settings, HostAdapters())
    return FeatureSchedules(parts, folder)


def check(schedules: FeatureSchedules, seeds: range) -> None:
    problems = [problem for seed in seeds for problem in schedules.run(seed)]
    assert not problems, "\n".join(problems[:20])
    print(schedules.tally)


@pytest.mark.parametrize("model", MODELS)
def test_a_few_schedules(tmp_path: Path, model: str) -> None:
    check(make_schedules(tmp_path, model), range(NUM_QUICK))
