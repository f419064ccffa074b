"""All features of an engine, under all conditions: completions equal those of lone requests."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from loraplex.core.output import FinishReason
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.models import rope_config
from support.examples import num_examples, quick_and_slow
from support.feature_schedules import (
    DYNAMIC,
    FEATURE_SETTINGS,
    LONGROPE,
    FeatureSchedules,
    feature_checkpoint,
)

WINDOW = {"max_attention_window_size": (9, 23), "sink_token_length": 3}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "window": {"dtype": "float32", **WINDOW},
    "one-window": {"dtype": "float32", "max_attention_window_size": (9, 160)},
    "window-int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8", **WINDOW},
}
ROPES: dict[str, tuple[dict[str, Any], bool]] = {
    "longrope": (LONGROPE, False),
    "longrope-recomputed": (LONGROPE, True),
    "dynamic": (DYNAMIC, False),
}
"""Fields of config.json, and whether sequences that outgrow the border are computed again."""
QUICK = ("float32", "window-int8-kv", "longrope")
"""Together they have all types, windows and a rope that depends on the length; CI runs all."""
NUM_SCHEDULES = num_examples(0.4)
"""Number of schedules for each model; each model has seeds of its own."""
ENOUGH = 200
"""Number of schedules in which everything in HAPPENINGS has happened."""
HAPPENINGS = (
    "aborts",
    "accepted",
    "adapter_evictions",
    "cached_tokens",
    "copies",
    "crashes",
    "failed_steps",
    "journaled_steps",
    "loads",
    "offloads",
    "preemptions",
    "replayed",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_schedules(folder: Path, model: str) -> FeatureSchedules:
    settings = msgspec.structs.replace(FEATURE_SETTINGS, **MODELS.get(model, {}))
    fields, recomputes = ROPES.get(model, ({}, False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_config, "RECOMPUTING", {"LlamaForCausalLM"} if recomputes else ())
        parts = load_parts(feature_checkpoint(folder, **fields), settings, HostAdapters())
    return FeatureSchedules(parts, folder)


def check(model: str, folder: Path, num_schedules: int) -> Counter[str]:
    schedules = make_schedules(folder, model)
    seeds = [f"{model} {number}" for number in range(num_schedules)]
    problems = [problem for seed in seeds for problem in schedules.run(seed)]
    assert not problems, "\n".join(problems[:20])
    return schedules.tally


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "model", quick_and_slow(QUICK, [name for name in [*MODELS, *ROPES] if name not in QUICK])
)
def test_schedules(tmp_path: Path, model: str) -> None:
    tally = check(model, tmp_path, NUM_SCHEDULES)
    assert tally["preemptions"] > 0
    assert tally["cached_tokens"] > 0
    assert tally["accepted"] > 0
    assert tally["replayed"] > 0
    if NUM_SCHEDULES >= ENOUGH:
        assert all(tally[name] > 0 for name in HAPPENINGS), tally


def test_the_features_take_effect(tmp_path: Path) -> None:
    """Check that completions differ; otherwise equal ones would prove little."""
    schedules = make_schedules(tmp_path, "float32")
    completions = [
        sequence for completion in schedules.alone for sequence in completion.sequences.values()
    ]
    finishes = Counter(sequence.finish for sequence in completions if sequence.finish is not None)
    assert finishes[FinishReason.LENGTH, None] > 0
    assert finishes[FinishReason.STOP, None] > 0
    assert len(finishes) > 3, "no stop tokens"
    texts = {tuple(sequence.token_ids) for sequence in completions}
    assert len(texts) > 0.9 * len(completions)
