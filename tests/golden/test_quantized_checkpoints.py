"""Adapters on bases that are quantised already, against transformers and PEFT on what is decoded.

Float32: log probabilities within a thousandth, and the same bits in a mixed batch as alone.
"""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.app.llm_outputs import RequestOutput
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.checkpoints import add_random_adapters, save_random_model, tiny_sizes
from support.examples import quick_and_slow
from support.gguf_files import gguf_of_llama
from support.quantized_checkpoints import CASES, quantize_folder

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
CONFIG = LlamaConfig(**tiny_sizes(VOCAB_SIZE, intermediate_size=96))
ADAPTERS = {
    "plain": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "dora": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_dora=True),
}
NAMES = (None, *ADAPTERS)
PROMPTS = [[(7 * i + 3 * k) % VOCAB_SIZE for k in range(9 + i)] for i in range(3)]
SAMPLING = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=0)
TESTED = quick_and_slow(("gptq-4-order",), sorted(CASES.keys() - {"gptq-4-order"}))


def log_probabilities(output: RequestOutput) -> list[float]:
    """Return those of the prompt's tokens, without the first."""
    found = output.prompt_logprobs
    assert found is not None
    return [entry.logprob for entry in found[1:] if entry is not None]


@pytest.mark.parametrize("name", TESTED)
def test_adapters_on_a_quantised_base(name: str, tmp_path: Path) -> None:
    model = save_random_model(tmp_path, CONFIG)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, tmp_path)
    model.load_state_dict(quantize_folder(tmp_path, CASES[name]), strict=False)
    peft_model = add_random_adapters(model, ADAPTERS)
    peft_model.save_pretrained(tmp_path / "adapters")
    adapters = {adapter: str(tmp_path / "adapters" / adapter) for adapter in ADAPTERS}

    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in NAMES]
    prompts, names = [prompt for prompt, _ in pairs], [adapter for _, adapter in pairs]
    settings = {"state_dir": str(tmp_path / "state"), "enable_prefix_cache": False}
    with LLM(str(tmp_path), adapters, **settings) as llm:
        mixed = llm.generate(prompts, SAMPLING, adapter=names)
        for (prompt, adapter), output in zip(pairs, mixed, strict=True):
            (alone,) = llm.generate([prompt], SAMPLING, adapter=adapter)
            assert log_probabilities(alone) == log_probabilities(output)
            assert alone.token_ids == output.token_ids

            if adapter is None:
                with peft_model.disable_adapter(), torch.inference_mode():
                    logits = peft_model(torch.tensor([prompt])).logits[0]
            else:
                peft_model.set_adapter(adapter)
                with torch.inference_mode():
                    logits = peft_model(torch.tensor([prompt])).logits[0]
            wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
            got = torch.tensor(log_probabilities(output))
            assert torch.allclose(got, wanted.flatten(), rtol=0, atol=1e-3)


def test_the_shipped_adapters_on_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "capitals-Q8_0.gguf"
    path.write_bytes(gguf_of_llama(BASE_PATH))
    adapters = {name: str(folder) for name, folder in ADAPTER_PATHS.items()}
    names = (None, *adapters)
    prompts = ["The capital of France is"] * len(names)
    sampling = SamplingParams(max_tokens=8, temperature=0)
    texts = []
    for model in (path, BASE_PATH):
        with LLM(str(model), adapters, state_dir=str(tmp_path / "state")) as llm:
            outputs = llm.generate(prompts, sampling, adapter=names)
            texts.append([output.text for output in outputs])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(names)
