"""Folders of embedding models: what they state of vectors, and checkpoints without an output layer.

The reference is the decoder of transformers, with PEFT on it, pooled in float64 by torch.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from loraplex import LLM, SamplingParams, UnsupportedFeatureError
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes

VOCAB_SIZE = 199
NUM_TOKENS = 2048
"""Tokens of a model with the tokenizer of the demo, or more."""
SIZES = tiny_sizes(VOCAB_SIZE, head_dim=16)
CONFIGS: Mapping[str, PretrainedConfig] = {
    "LlamaModel": LlamaConfig(**SIZES),
    "MistralModel": MistralConfig(**SIZES, sliding_window=11),
    "Qwen2Model": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen3Model": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules="all-linear", task_type=TaskType.FEATURE_EXTRACTION
)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 30)]


def pooled(model: Any, prompt: list[int], kind: str) -> torch.Tensor:
    with torch.no_grad():
        states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double()
    if kind == "lasttoken":
        return states[-1]
    if kind == "cls":
        return states[0]
    weights = torch.ones(len(prompt)) if kind == "mean" else torch.arange(1, len(prompt) + 1)
    return (weights.double() @ states) / weights.sum()


def write_modules(
    folder: Path, kind: str, *, normalizes: bool, includes_prompts: bool = True
) -> None:
    """Write the files of sentence-transformers as its version 6 does."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if not index else f"{index}_{name}",
            "type": f"sentence_transformers.sentence_transformer.modules.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling: dict[str, Any] = {"embedding_dimension": 64, "pooling_mode": kind}
    pooling["include_prompt"] = includes_prompts
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("architecture", "kind", "normalizes"),
    [
        ("LlamaModel", "mean", False),
        ("MistralModel", "lasttoken", True),
        ("Qwen2Model", "weightedmean", True),
        ("Qwen3Model", "cls", False),
    ],
)
def test_checkpoints_without_head_give_the_vectors_of_their_folder(
    tmp_path: Path, architecture: str, kind: str, normalizes: bool
) -> None:
    model = save_random_model(tmp_path / "whole", CONFIGS[architecture]).model
    folder, adapter_folder = tmp_path / "model", tmp_path / "adapter"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    write_modules(folder, kind, normalizes=normalizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    expected = [pooled(model, prompt, kind) for prompt in PROMPTS]
    torch.default_generator.manual_seed(3)
    tuned: PeftModel = get_peft_model(model, LORA).eval()
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(str(adapter_folder))
    expected += [pooled(tuned, prompt, kind) for prompt in PROMPTS]

    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
    with LLM(folder, {"a": adapter_folder}, state_dir=tmp_path / "state", **settings) as llm:
        found = llm.embed(PROMPTS * 2, adapter=[None] * 3 + ["a"] * 3)
        short = llm.embed(PROMPTS * 2, adapter=[None] * 3 + ["a"] * 3, dimensions=10)
        with pytest.raises(UnsupportedFeatureError, match="no output layer"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    for result, cut, wanted in zip(found, short, expected, strict=True):
        vector = torch.from_numpy(result.vector).double()
        assert torch.cosine_similarity(vector, wanted, 0) >= 1 - 1e-6
        length = 1.0 if normalizes else wanted.norm().item()
        assert vector.norm().item() == pytest.approx(length, rel=1e-4)
        first = torch.from_numpy(cut.vector).double()
        torch.testing.assert_close(
            first, wanted[:10] / wanted[:10].norm(), rtol=1e-4, atol=1e-5, check_dtype=False
        )
    assert [result.adapters for result in found[:3]] == [()] * 3
    assert {result.adapters[0].name for result in found[3:]} == {"a"}


@pytest.mark.parametrize("kind", ["mean", "weightedmean", "cls"])
def test_vectors_without_the_tokens_of_the_prompt(tmp_path: Path, kind: str) -> None:
    """`include_prompt` false, compared with sentence-transformers' own pooling."""
    config = Qwen3Config(**tiny_sizes(NUM_TOKENS, head_dim=16), tie_word_embeddings=True)
    model = save_random_model(tmp_path / "whole", config).model
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    write_modules(folder, kind, normalizes=True, includes_prompts=False)
    prompts = {"prompts": {"query": "Find this: ", "none": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    peer = SentenceTransformer(str(folder), device="cpu")
    peer.tokenizer.pad_token = peer.tokenizer.eos_token
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
    texts = ["Paris is", "a"]
    with LLM(folder, state_dir=tmp_path / "state", **settings) as llm:
        vectors = {}
        for name in ("query", "none"):
            found = np.stack([one.vector for one in llm.embed(texts, prompt_name=name)])
            expected = [peer.encode(text, prompt_name=name) for text in texts]
            assert (found * np.stack(expected)).sum(1) == pytest.approx(1, abs=1e-6)
            vectors[name] = found
        whole = llm.embed([prompts["prompts"]["query"] + text for text in texts])
        assert (np.stack([one.vector for one in whole]) != vectors["query"]).any()
