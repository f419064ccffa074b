"""Tokens and logits have the same bits alone and in any schedule of a real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from support.examples import num_examples
from support.random_schedules import Schedules
from support.tiny_model import TinyCheckpoint

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
}
SETTINGS = RunnerSettings(block_size=4, num_blocks=80, max_num_seqs=8, max_lora_rank=8)
NUM_SCHEDULES = num_examples(1.6)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_schedules(folder: Path, dtype: str, num_threads: int) -> Schedules:
    torch.set_num_threads(num_threads)
    checkpoint = TinyCheckpoint(folder, **SHAPE, torch_dtype=dtype)
    return Schedules(load_parts(checkpoint.save(), SETTINGS, HostAdapters()))


def check(schedules: Schedules, seeds: range) -> None:
    problems = [problem for seed in seeds for problem in schedules.run(seed)]
    assert not problems, "\n".join(problems[:20])
    tally = schedules.tally
    assert tally.preemptions > 0
    assert tally.cached_tokens > 0
    assert tally.adapter_evictions > 0
    assert tally.aborts > 0
    assert tally.replays > 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("dtype", "num_threads"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)]
)
def test_schedules(tmp_path: Path, dtype: str, num_threads: int) -> None:
    check(make_schedules(tmp_path, dtype, num_threads), range(NUM_SCHEDULES))


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    one, two = (make_schedules(tmp_path, "bfloat16", number) for number in (1, 2))
    assert one.alone == two.alone
