"""Every trait of the model families in a real engine: the same bits alone and in any schedule.

In a schedule sequences are preempted, find blocks of others in the prefix cache, and continue in
another engine.
"""

from pathlib import Path

import pytest

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from support.examples import num_examples
from support.families import every
from support.random_schedules import Schedules

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = every.CASES
SETTINGS = RunnerSettings(block_size=4, num_blocks=60, max_num_seqs=6, max_lora_rank=8)
NUM_SCHEDULES = num_examples(0.8)
QUICK = "cohere2"
"""Windows, full layers without positions, interleaved rope, attention and feed-forward at once."""
TRAITS = {
    "windows and full layers": ("gemma3", "olmo3", "cohere2-types", "smollm3-windows"),
    "windows shorter than a block": ("gemma3-period", "cohere2-period", "olmo3-biases"),
    "keys and values of other layers": ("gemma4", "gemma4-period", "gemma4-unified-shared"),
    "heads of two sizes": ("gemma4-keys-are-values",),
    "windows in all layers": ("starcoder2", "phi3-window"),
    "soft caps": ("gemma2", "gemma2-small-caps"),
    "ALiBi": ("falcon-alibi", "bloom", "bloom-7-heads", "baichuan"),
    "partial rope": ("phi-part", "gpt-neox", "glm4"),
    "interleaved rope": ("gptj", "gptj-odd"),
    "attention and feed-forward at once": ("cohere", "phi", "falcon-new"),
    "heads in another order": ("internlm2", "bloom-one-head"),
    "learned positions": ("opt", "opt-350m"),
    "rope that depends on the length": ("phi3", "phi3-short"),
    "scaled rope": ("gemma3-yarn", "starcoder2-yarn"),
    "queries scaled by position": ("ministral3",),
    "norms after the rotation": ("hunyuan",),
    "multipliers": ("granite",),
    "latent attention": ("deepseek-v2", "mistral4"),
    "attention in chunks": ("llama4",),
    "experts": ("mixtral-window", "qwen2-moe-windows", "qwen3-moe", "ernie-moe"),
    "experts in addition to a dense part": ("gemma4-experts", "gemma4-experts-and-inputs"),
}


def parameters() -> list[object]:
    """Return the cases by trait. CI runs the first of each, and `make soak` the others."""
    others = [
        pytest.param(name, marks=pytest.mark.soak if i else pytest.mark.slow)
        for names in TRAITS.values()
        for i, name in enumerate(names)
    ]
    return [QUICK, *others]


@pytest.mark.parametrize("name", parameters())
def test_same_bits_preempted_cached_and_replayed(name: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path)
    schedules = Schedules(
        load_parts(tmp_path, SETTINGS, HostAdapters()),
        num_requests=12,
        max_prompt_tokens=24,
        max_tokens=20,
        ranks=(1, 3),
    )
    problems = [problem for seed in range(NUM_SCHEDULES) for problem in schedules.run(seed)]
    assert not problems, "\n".join(problems[:20])
    tally = schedules.tally
    assert tally.preemptions > 0
    assert tally.cached_tokens > 0
    assert tally.replays > 0
