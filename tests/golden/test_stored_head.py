"""A tied model whose file holds another output layer, against transformers: one of each family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from support.checkpoints import save_random_model, tiny_gpt2, tiny_sizes
from support.step_driver import Prompt, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
SIZES = tiny_sizes(VOCAB_SIZE)
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gpt2": lambda: tiny_gpt2(VOCAB_SIZE),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("is_equal", [True, False])
def test_the_head_in_the_file(family: str, *, is_equal: bool, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, CONFIGS[family]())
    file = tmp_path / "model.safetensors"
    embedding = model.get_input_embeddings().weight.detach()
    head = embedding.clone() if is_equal else embedding.flip(0).contiguous()
    save_file(load_file(file) | {"lm_head.weight": head}, file, {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompt = Prompt((5, 17, 3, 101, 64))
    expected = reference.generate(
        torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    settings = RunnerSettings(num_blocks=20, block_size=8, max_num_seqs=2)
    parts = load_parts(tmp_path, settings, HostAdapters())
    driver = StepDriver(ModelRunner(parts), list(range(20)))
    (generated,) = driver.generate([prompt], 12)
    assert generated == expected[0, len(prompt.token_ids) :].tolist()
