"""Vectors of sentence-transformers itself, with PEFT's adapters on it, in float32."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, TaskType
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    AutoModel,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex import LLM, SamplingParams, UnsupportedFeatureError
from loraplex.demo import BASE_PATH
from support.checkpoints import tiny_sizes

SIZES = tiny_sizes(1024, head_dim=16, eos_token_id=2, pad_token_id=0)
TEXTS = [
    "The capital of France?",
    "A",
    "Berlin is in Germany, and the river through it is the Spree. " * 3,
    "Which town has the most bridges?",
]
PROMPTS = {"query": "Instruct: find the passage\nQuery: ", "document": "title: none | text: "}
NUM_ADAPTERS = 2


class Folder(NamedTuple):
    """A kind of embedding model."""

    config: PretrainedConfig
    modules: Callable[[], list[Any]]
    """Modules after the transformer."""
    ends_with_eos: bool = True


FOLDERS: Mapping[str, Folder] = {
    "qwen3, last": Folder(
        Qwen3Config(**SIZES, tie_word_embeddings=True),
        lambda: [Pooling(64, pooling_mode="lasttoken"), Normalize()],
    ),
    "mistral, last": Folder(
        MistralConfig(**SIZES, sliding_window=13),
        lambda: [Pooling(64, pooling_mode="lasttoken"), Normalize()],
    ),
    "gemma 3, both directions": Folder(
        Gemma3TextConfig(
            **SIZES,
            use_bidirectional_attention=True,
            sliding_window=14,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
        ),
        lambda: [
            Pooling(64, pooling_mode="mean"),
            Dense(64, 96, bias=False, activation_function=torch.nn.Identity()),
            Dense(96, 48, bias=True),
            Normalize(),
        ],
    ),
    "qwen2, both directions": Folder(
        Qwen2Config(**SIZES, is_causal=False),
        lambda: [Pooling(64, pooling_mode="lasttoken")],
    ),
    "mistral, windows in both directions": Folder(
        MistralConfig(**SIZES, sliding_window=7, is_causal=False),
        lambda: [Pooling(64, pooling_mode="weightedmean")],
        ends_with_eos=False,
    ),
    "llama, both directions": Folder(
        LlamaConfig(**SIZES, is_causal=False),
        lambda: [Pooling(64, pooling_mode="mean"), Dense(64, 32)],
    ),
}


def write_tokenizer(folder: Path, *, ends_with_eos: bool) -> None:
    """Write the shipped tokenizer; its post-processor may append the end token."""
    tokenizer = json.loads((BASE_PATH / "tokenizer.json").read_text())
    if ends_with_eos:
        processor = tokenizer["post_processor"]
        processor["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
        processor["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((BASE_PATH / "tokenizer_config.json").read_text())
    # With a chat template sentence-transformers makes a message of each text.
    config.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def randomize(model: torch.nn.Module, seed: int, *, only: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                mean = 1.0 if "norm" in name else 0.0
                parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))


def saved_model(folder: Path, kind: Folder) -> SentenceTransformer:
    """Write a folder by sentence-transformers, with random parameters, and open it."""
    plain = folder.parent / "transformer"
    models: Any = AutoModel
    models.from_config(kind.config).save_pretrained(plain)
    write_tokenizer(plain, ends_with_eos=kind.ends_with_eos)
    modules = [Transformer(str(plain)), *kind.modules()]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
    randomize(model, 1)
    model.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def encoded(model: SentenceTransformer, prompt_name: str | None) -> torch.Tensor:
    """Vectors of TEXTS, each alone: no row has padding."""
    vectors = [
        model.encode(text, prompt_name=prompt_name, convert_to_tensor=True) for text in TEXTS
    ]
    return torch.stack(vectors).double()


def add_adapter(base: Path, folder: Path, seed: int) -> SentenceTransformer:
    """Save a random adapter as sentence-transformers does; return the model with it."""
    model = SentenceTransformer(str(base), device="cpu")
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type=TaskType.FEATURE_EXTRACTION
    )
    model.add_adapter(lora)
    # Each adapter has prompts of its own, and a default.
    model.prompts = {"query": f"Task {seed}: ", "document": "title: "}
    model.default_prompt_name = "document"
    randomize(model, seed, only="lora_")
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_of_texts_and_adapters_in_one_batch(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    models = [saved_model(folder, FOLDERS[name])]
    adapters: dict[str, Path] = {}
    for number in range(NUM_ADAPTERS):
        adapters[f"a{number}"] = tmp_path / f"a{number}"
        models.append(add_adapter(folder, adapters[f"a{number}"], number + 2))
    named: list[str | None] = [None, *adapters]
    choices = [adapter for adapter in named for _ in TEXTS]
    settings: dict[str, Any] = {"max_model_len": 128, "kv_cache_bytes": 1 << 21, "max_num_seqs": 8}
    with LLM(folder, adapters, state_dir=tmp_path / "state", **settings) as llm:
        for prompt_name in (None, "query", "document"):
            expected = torch.cat([encoded(model, prompt_name) for model in models])
            results = llm.embed(TEXTS * len(named), adapter=choices, prompt_name=prompt_name)
            found = torch.stack([torch.from_numpy(result.vector) for result in results]).double()
            assert found.shape == expected.shape
            cosines = torch.cosine_similarity(found, expected, 1)
            assert cosines.min() >= 1 - 1e-6, cosines
            torch.testing.assert_close(found.norm(dim=1), expected.norm(dim=1), rtol=1e-4, atol=0)
            # The adapters differ from the base and from each other.
            apart = torch.cosine_similarity(expected[0::4][:3], expected[0::4][[1, 2, 0]], 1)
            assert apart.max() < 0.999
        short = llm.embed(TEXTS[:1], dimensions=8)[0].vector
        assert short.shape == (8,)
        assert abs(float((short**2).sum()) - 1) < 1e-5
        with pytest.raises(UnsupportedFeatureError, match="no text: its"):
            llm.generate(TEXTS[:1], SamplingParams(max_tokens=2))
