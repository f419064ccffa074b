"""LoRA of the output layer where PEFT's files have more than its factors, against PEFT."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import GPTJConfig, LlamaConfig, PhiConfig, PhimoeConfig, PretrainedConfig

from loraplex import LLM, SamplingParams
from loraplex.demo import BASE_PATH
from support.checkpoints import save_random_model, tiny_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
PROMPT = [3, 9, 17, 190, 5]
NUM_NEW_TOKENS = 4
TOLERANCE = 1e-4
SIZES = tiny_sizes(VOCAB_SIZE)
GPTJ = GPTJConfig(
    vocab_size=VOCAB_SIZE,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=128,
    rotary_dim=8,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
)
HEAD = {"target_modules": ["q_proj", "lm_head"]}
# The model, the arguments of LoraConfig, and a tensor that makes the case one.
CASES: dict[str, tuple[PretrainedConfig, dict[str, Any], str]] = {
    "phi": (PhiConfig(**SIZES), HEAD, "lm_head.base_layer.bias"),
    "gptj": (GPTJ, HEAD, "lm_head.base_layer.bias"),
    "phimoe": (PhimoeConfig(**SIZES, lm_head_bias=True), HEAD, "lm_head.base_layer.bias"),
    "tied": (
        LlamaConfig(**(SIZES | {"tie_word_embeddings": True})),
        {**HEAD, "ensure_weight_tying": True},
        "model.embed_tokens.lora_embedding_A",
    ),
}
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_adapter_is_served_as_by_peft(name: str, tmp_path: Path) -> None:
    config, form, tensor = CASES[name]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model: Any = save_random_model(base, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **form))
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
        trained.save_pretrained(adapter)
        assert f"base_model.model.{tensor}" in load_file(adapter / "adapter_model.safetensors")
        loaded: Any = PeftModel.from_pretrained(type(model).from_pretrained(base), adapter).eval()
    output = loaded.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    logprobs = loaded(output).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    tokens = output[0, len(PROMPT) :]
    with LLM(str(base), {"adapter": str(adapter)}, state_dir=str(tmp_path / "state")) as llm:
        (found,) = llm.generate([PROMPT], SAMPLING, adapter=["adapter"])
    assert list(found.token_ids) == tokens.tolist()
    own = torch.tensor([token.logprob for token in found.logprobs])
    expected = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert float((own - expected).abs().max()) < TOLERANCE
