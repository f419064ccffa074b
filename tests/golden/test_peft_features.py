"""Every feature of PEFT's LoRA against transformers and PEFT: tokens and logits, in four families.

An adapter is trained (every trainable parameter random), saved and loaded again by PEFT itself on a
fresh base: what it then answers is what is expected of the server, alone and in a mixed batch.
"""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex import LLM, SamplingParams
from loraplex.testing.capitals import BASE_PATH
from loraplex.testing.checkpoints import save_random_model

NUM_NEW_TOKENS = 8
VOCAB_SIZE = 199
TOLERANCE = 1e-4

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
ATTENTION = ["q_proj", "v_proj", "o_proj"]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ATTENTION},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"q_proj": 16, "layers.0.self_attn.q_proj": 2},
        "use_rslora": True,
    },
    "layers": {
        "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "exclude": {"target_modules": ATTENTION, "exclude_modules": ["v_proj"]},
    "exclude-regex": {"target_modules": ATTENTION, "exclude_modules": r".*layers\.0\..*"},
    "regex": {"target_modules": r".*\.(q|k|gate)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "fan-in-fan-out": {"target_modules": ATTENTION, "fan_in_fan_out": True},
    "bias-all": {"target_modules": ATTENTION, "bias": "all"},
    "bias-lora-only": {"target_modules": ATTENTION, "bias": "lora_only"},
    "lora-bias": {"target_modules": "all-linear", "lora_bias": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "dora-bias": {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": "all"},
    "dora-head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head-bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "ends-tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "copies": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    "copy-of-embedding": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]},
    "copy-of-head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 190, 17]},
    "tokens-of-both": {
        "target_modules": ATTENTION,
        "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7, 2, 11]},
    },
    "gaussian": {"target_modules": ATTENTION, "init_lora_weights": "gaussian"},
}
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[3, 9, 17, 190, 5, 7, 60], [11, 2, 3, 150]]


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    """Of the tokens."""


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: dict[str | None, list[Answer]]
    """By adapter; one for each prompt."""

    def adapter(self, name: str) -> str:
        return str(self.folder / "adapters" / name)

    def open(self, names: list[str], **settings: Any) -> LLM:
        adapters = {name: self.adapter(name) for name in names}
        return LLM(str(self.folder), adapters, state_dir=str(self.folder / "state"), **settings)


def fresh_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(model: PeftModel) -> None:
    """Every trainable parameter near its beginning, none the same as the base's."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = 0.15 * torch.randn_like(parameter)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else parameter + noise)


def reference(model: Any, prompt: list[int]) -> Answer:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    new = output[0, len(prompt) :]
    logits = model(output).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, new.unsqueeze(1)).squeeze(1)
    return Answer(tuple(new.tolist()), logprobs)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    base = save_random_model(folder, FAMILIES[request.param])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    expected: dict[str | None, list[Answer]] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected[None] = [reference(base, prompt) for prompt in PROMPTS]
        for index, (name, feature) in enumerate(FEATURES.items()):
            torch.manual_seed(index)
            model = get_peft_model(fresh_base(folder), LoraConfig(r=4, lora_alpha=6, **feature))
            train(model)
            model.save_pretrained(folder / "adapters" / name)
            loaded = PeftModel.from_pretrained(fresh_base(folder), folder / "adapters" / name)
            expected[name] = [reference(loaded.eval(), prompt) for prompt in PROMPTS]
    return Case(folder, expected)


def check(case: Case, names: list[str | None], answers: list[Any], prompts: list[int]) -> None:
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        want = case.expected[name][prompt]
        found = torch.tensor([token.logprob for token in answer.logprobs])
        torch.testing.assert_close(
            found, want.logprobs, rtol=0, atol=TOLERANCE, msg=lambda text, of=name: f"{of}: {text}"
        )
        assert answer.token_ids == want.token_ids, name


def test_features_matter(case: Case) -> None:
    """Else the rest would show nothing."""
    base = case.expected[None]
    for name in FEATURES:
        difference = max(
            float((mine.logprobs[0] - its.logprobs[0]).abs())
            for mine, its in zip(case.expected[name], base, strict=True)
        )
        assert difference > 10 * TOLERANCE, name


def test_all_in_one_batch(case: Case) -> None:
    names = [None, *FEATURES] * len(PROMPTS)
    prompts = [index for index in range(len(PROMPTS)) for _ in (None, *FEATURES)]
    with case.open(list(FEATURES)) as llm:
        answers = llm.generate([PROMPTS[index] for index in prompts], SAMPLING, adapter=names)
        check(case, names, answers, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_alone(case: Case, name: str) -> None:
    with case.open([name]) as llm:
        check(case, [name], llm.generate([PROMPTS[0]], SAMPLING, adapter=[name]), [0])
