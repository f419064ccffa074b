"""Every model family against transformers and PEFT: logits, greedy tokens, and in any company.

Tiny random checkpoints; the runner is driven by hand-made plans.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
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

from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.kernels.reference import ReferenceKernels
from support.checkpoints import (
    add_random_adapters,
    host_adapter,
    save_random_model,
    tiny_gpt2,
    tiny_sizes,
)
from support.reference_completions import (
    RecordingSampler,
    recorded_driver,
    reference_completion,
    relative_error,
)
from support.step_driver import Prompt, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW_TOKENS = 24
VOCAB_SIZE = 199
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Relative to the largest logit, over two layers and a rank-16 adapter."""

SIZES = tiny_sizes(VOCAB_SIZE)
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.7 * i for i in range(8)],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(SIZES | changes))


def rope_llama(name: str) -> Callable[[], LlamaConfig]:
    return lambda: llama(rope_parameters={"rope_theta": 10_000.0, **ROPES[name]})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    **{f"llama-{name}": rope_llama(name) for name in ROPES},
    # The prompts are shorter than 48 tokens, the generations go beyond.
    "llama-dynamic": lambda: llama(
        max_position_embeddings=48,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    ),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=13, head_dim=24),
    "mistral-full": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3-bias": lambda: Qwen3Config(**SIZES, head_dim=8, attention_bias=True),
    "gpt2": lambda: tiny_gpt2(VOCAB_SIZE),
    "gpt2-gelu": lambda: tiny_gpt2(
        VOCAB_SIZE,
        activation_function="gelu",
        n_inner=None,
        layer_norm_epsilon=1e-3,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt2-relu": lambda: tiny_gpt2(
        VOCAB_SIZE,
        activation_function="relu",
        n_head=2,
        tie_word_embeddings=False,
        scale_attn_weights=False,
        reorder_and_upcast_attn=True,
    ),
}

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, LoraConfig] = {
    "attention": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
    "all": LoraConfig(
        r=8,
        lora_alpha=8,
        target_modules=ALL_MODULES,
        rank_pattern={"k_proj": 3, "layers.1.mlp.down_proj": 16},
        alpha_pattern={"k_proj": 5},
    ),
    "one-layer": LoraConfig(
        r=1, lora_alpha=2, target_modules=["o_proj", "down_proj"], layers_to_transform=[1]
    ),
}
GPT2_ADAPTERS: dict[str, LoraConfig] = {
    "attention": LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True),
    "all": LoraConfig(
        r=8,
        lora_alpha=8,
        target_modules=["c_attn", "c_proj", "c_fc"],
        rank_pattern={"attn.c_proj": 3, "h.1.mlp.c_proj": 16},
        alpha_pattern={"c_attn": 5},
        fan_in_fan_out=True,
    ),
    "one-layer": LoraConfig(
        r=1,
        lora_alpha=2,
        target_modules=["c_proj"],
        layers_to_transform=[1],
        layers_pattern="h",
        fan_in_fan_out=True,
    ),
}
HANDLES = {name: handle for handle, name in enumerate(ADAPTERS, start=11)}


@dataclasses.dataclass(frozen=True)
class Subject:
    """One checkpoint in both implementations."""

    folder: Path
    reference: PeftModel
    adapters: Mapping[int, HostAdapter]

    @functools.cached_property
    def expected(self) -> dict[str | None, tuple[torch.Tensor, list[int]]]:
        """What the reference gives for PROMPTS, by adapter: its logits and its tokens."""
        return {
            adapter: reference_completion(self.reference, adapter, prompt, NUM_NEW_TOKENS)
            for adapter, prompt in PROMPTS.items()
        }

    def driver(
        self, *, scrambled: bool = False, **settings: Any
    ) -> tuple[StepDriver, RecordingSampler]:
        ranks = {"max_lora_rank": 16}
        return recorded_driver(
            self.folder, self.adapters, is_scrambled=scrambled, **(ranks | settings)
        )


def make_subject(folder: Path, config: PretrainedConfig) -> Subject:
    configs = GPT2_ADAPTERS if isinstance(config, GPT2Config) else ADAPTERS
    reference = add_random_adapters(save_random_model(folder, config), configs)
    adapters = {handle: host_adapter(reference, name) for name, handle in HANDLES.items()}
    return Subject(folder, reference, adapters)


@pytest.fixture(autouse=True, params=["fastest", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine would choose, and torch alone: both must be right."""
    if request.param == "reference":
        monkeypatch.setattr(
            loading, "select_kernels", lambda device, *_, **__: ReferenceKernels(device)
        )


@pytest.fixture(scope="module", params=CONFIGS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), CONFIGS[request.param]())


def make_prompt(length: int, adapter: str | None, seed: int = 0) -> Prompt:
    rng = random.Random(length + 1000 * seed)
    tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
    return Prompt(tokens, ((HANDLES[adapter], 1.0),) if adapter else ())


# Longer than 32, the original length of the stretched ropes, and at most 48.
PROMPTS = {
    None: make_prompt(37, None),
    "attention": make_prompt(34, "attention"),
    "all": make_prompt(45, "all"),
    "one-layer": make_prompt(40, "one-layer"),
}


# Half precision is quick on both.
quick_on_fastest = pytest.mark.parametrize(
    "backend", ["fastest", pytest.param("reference", marks=pytest.mark.slow)], indirect=True
)


@pytest.mark.some(8)
@quick_on_fastest
def test_same_logits_and_tokens_as_transformers(subject: Subject) -> None:
    driver, sampler = subject.driver()
    for adapter, (logits, tokens) in subject.expected.items():
        sampler.logits.clear()
        (generated,) = driver.generate([PROMPTS[adapter]], NUM_NEW_TOKENS, prompt_logits=True)
        assert relative_error(sampler.logits[0], logits) < FLOAT32_TOLERANCE, adapter
        assert generated == tokens, adapter


@pytest.mark.some(8)
@quick_on_fastest
def test_same_bits_in_company_in_chunks_and_in_other_blocks(subject: Subject) -> None:
    prompts = list(PROMPTS.values())
    driver, sampler = subject.driver()
    alone, last_logits = [], []
    for prompt in prompts:
        alone += driver.generate([prompt], NUM_NEW_TOKENS)
        last_logits.append(sampler.logits[-1])
    driver, sampler = subject.driver(scrambled=True)
    assert driver.generate(prompts, NUM_NEW_TOKENS) == alone
    assert torch.equal(sampler.logits[-1], torch.cat(last_logits))
    for chunk_size in (1, 7, 19):
        assert driver.generate(prompts[::-1], NUM_NEW_TOKENS, chunk_size=chunk_size) == alone[::-1]


@pytest.mark.some(8)
@quick_on_fastest
def test_adapters_change_the_completions(subject: Subject) -> None:
    """Or the other tests would prove nothing about them."""
    tokens = PROMPTS["all"].token_ids
    prompts = [Prompt(tokens), *(Prompt(tokens, ((h, 1.0),)) for h in HANDLES.values())]
    driver, _ = subject.driver()
    completions = {tuple(completion) for completion in driver.generate(prompts, NUM_NEW_TOKENS)}
    assert len(completions) == len(prompts)


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", HALF_TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ["llama-default", "qwen3", "gpt2"])
def test_half_precision_logits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    subject = make_subject(tmp_path, CONFIGS[name]())
    driver, sampler = subject.driver(dtype=str(dtype).removeprefix("torch."))
    reference = subject.reference.to(dtype)
    for adapter, prompt in PROMPTS.items():
        logits, _ = reference_completion(reference, adapter, prompt, 1)
        sampler.logits.clear()
        driver.generate([prompt], 1, prompt_logits=True)
        assert relative_error(sampler.logits[0], logits) < HALF_TOLERANCES[dtype], adapter


def test_longrope_of_a_short_server_uses_the_short_factors(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, CONFIGS["llama-longrope"]())
    prompt = make_prompt(9, "all")
    _, tokens = reference_completion(subject.reference, "all", prompt, 20)
    driver, _ = subject.driver(max_model_len=32)
    assert driver.generate([prompt], 20) == [tokens]
