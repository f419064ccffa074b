"""The whole library against transformers and PEFT, under every schedule that could go wrong.

Float32 and greedy: the very same tokens, whatever else is in the batch, however prompts are cut,
whatever is evicted, and in another process.
"""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex import LLM, SamplingParams
from loraplex.demo import BASE_PATH
from support.checkpoints import (
    add_random_adapters,
    save_random_model,
    tiny_gpt2,
    tiny_sizes,
)
from support.examples import quick_and_slow

NUM_NEW_TOKENS = 20
VOCAB_SIZE = 199
SMALLEST_POOL_BYTES = 159_360
GPT2_POOL_BYTES = 94_208
"""One adapter of rank 16 on every module."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Layers, keys and values, KV heads, head size, tokens, bytes: of one block of these models."""
GPT2_BLOCK_BYTES = 2 * BLOCK_BYTES
"""Its four heads share no keys."""

SIZES = tiny_sizes(VOCAB_SIZE, head_dim=16)
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=11),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "gpt2": tiny_gpt2(VOCAB_SIZE),
}
ADAPTERS = {
    "attention": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "all": LoraConfig(r=16, lora_alpha=16, use_rslora=True, target_modules="all-linear"),
    "mixed": LoraConfig(
        r=8,
        lora_alpha=4,
        target_modules=["k_proj", "o_proj", "up_proj", "down_proj"],
        rank_pattern={"up_proj": 3},
        alpha_pattern={"o_proj": 32},
    ),
    "one-layer": LoraConfig(
        r=5, lora_alpha=10, target_modules=["q_proj", "gate_proj"], layers_to_transform=[1]
    ),
}
GPT2_ADAPTERS = {
    "attention": LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True),
    "all": LoraConfig(
        r=16, lora_alpha=16, use_rslora=True, target_modules="all-linear", fan_in_fan_out=True
    ),
    "mixed": LoraConfig(
        r=8,
        lora_alpha=4,
        target_modules=["c_proj", "c_fc"],
        rank_pattern={"c_fc": 3},
        alpha_pattern={"attn.c_proj": 32},
        fan_in_fan_out=True,
    ),
    "one-layer": LoraConfig(
        r=5,
        lora_alpha=10,
        target_modules=["attn.c_proj"],
        layers_to_transform=[1],
        fan_in_fan_out=True,
    ),
}
NAMES = (None, *ADAPTERS)
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A folder to serve, and the output of transformers and PEFT."""

    folder: Path
    adapters: dict[str, str]
    prompts: list[list[int]]
    names: list[str | None]
    expected: list[tuple[int, ...]]
    has_window: bool
    block_bytes: int
    pool_bytes: int

    def open(self, **settings: Any) -> LLM:
        return LLM(
            str(self.folder), self.adapters, state_dir=str(self.folder / "state"), **settings
        )

    def generate(self, llm: LLM) -> list[tuple[int, ...]]:
        completions = llm.generate(self.prompts, SAMPLING, adapter=self.names)
        return [completion.token_ids for completion in completions]


def make_prompts() -> list[list[int]]:
    """Two beginnings shared by several prompts, and lengths on both sides of a block."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    beginnings = [tokens(33), tokens(16)]
    return [beginnings[i % 2] + tokens(i % 4) for i in range(5)] + [
        tokens(length) for length in (1, 15, 16, 17, 40)
    ]


def references(
    model: PeftModel, prompts: list[list[int]], name: str | None
) -> list[tuple[int, ...]]:
    """Return the greedy tokens of each prompt, without any KV cache.

    The prompts are padded on the right: attention is causal, so none sees the padding.
    """
    rows = torch.arange(len(prompts))
    ends = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(ends.max()) + NUM_NEW_TOKENS, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    if name is not None:
        model.set_adapter(name)
    with model.disable_adapter() if name is None else contextlib.nullcontext():
        for step in range(NUM_NEW_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits
            ids[rows, ends + step] = logits[rows, ends + step - 1].argmax(-1)
    return [
        tuple(row[end : end + NUM_NEW_TOKENS].tolist())
        for row, end in zip(ids, ends.tolist(), strict=True)
    ]


TESTED = quick_and_slow(("mistral",), ("gpt2", "llama", "qwen2", "qwen3"))


@pytest.fixture(scope="module", params=TESTED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    config = FAMILIES[request.param]
    is_gpt2 = isinstance(config, GPT2Config)
    adapters = GPT2_ADAPTERS if is_gpt2 else ADAPTERS
    model = add_random_adapters(save_random_model(folder, config), adapters)
    shutil.copy(BASE_PATH / "tokenizer.json", folder)
    shutil.copy(BASE_PATH / "tokenizer_config.json", folder)
    model.save_pretrained(folder / "adapters")
    prompts = make_prompts()
    pairs = [(prompt, name) for prompt in prompts for name in NAMES]
    with torch.inference_mode():
        by_name = [references(model, prompts, name) for name in NAMES]
    expected = [tokens for of_prompt in zip(*by_name, strict=True) for tokens in of_prompt]
    return Case(
        folder,
        {name: str(folder / "adapters" / name) for name in ADAPTERS},
        [prompt for prompt, _ in pairs],
        [name for _, name in pairs],
        expected,
        has_window=request.param == "mistral",
        block_bytes=GPT2_BLOCK_BYTES if is_gpt2 else BLOCK_BYTES,
        pool_bytes=GPT2_POOL_BYTES if is_gpt2 else SMALLEST_POOL_BYTES,
    )


def test_adapters_matter(case: Case):
    """Else the rest would show nothing."""
    assert len(set(case.expected[: len(NAMES)])) == len(NAMES)


def test_alone(case: Case):
    with case.open() as llm:
        for index in range(0, len(case.prompts), 6):  # each prompt length and adapter in turn
            completion = llm.generate([case.prompts[index]], SAMPLING, adapter=case.names[index])
            assert completion[0].token_ids == case.expected[index]


def test_prefills_in_small_chunks(case: Case):
    with case.open(max_num_batched_tokens=7, max_num_seqs=5) as llm:
        assert case.generate(llm) == case.expected


def test_preempted_and_recomputed(case: Case):
    with case.open(kv_cache_bytes=12 * case.block_bytes) as llm:
        assert case.generate(llm) == case.expected
        # A window frees the blocks that it has passed: then no sequence is preempted.
        assert bool(llm.stats().preemptions) == (not case.has_window)


def test_all_in_one_batch_and_again_with_prefix_hits(case: Case):
    with case.open() as llm:
        assert case.generate(llm) == case.expected
        before = llm.stats().cached_tokens
        assert case.generate(llm) == case.expected
        assert llm.stats().cached_tokens > before


def test_adapters_evicted_and_loaded_again(case: Case):
    with case.open(lora_device_bytes=case.pool_bytes, max_lora_rank=16) as llm:
        assert case.generate(llm) == case.expected
        evictions = llm.stats().adapters.device_evictions
        assert evictions > 0
        # The pool never holds all adapters: whichever are missing come back in place of others.
        assert case.generate(llm) == case.expected
        assert llm.stats().adapters.device_evictions > evictions


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_through_the_engine_process(case: Case):
    with case.open(engine="process") as llm:
        assert case.generate(llm) == case.expected
