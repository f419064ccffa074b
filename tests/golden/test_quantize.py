"""A model that `loraplex quantize` wrote: against transformers and PEFT on what is decoded."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.app.quantize import Calibration, quantize
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.execution.quantizing.rounding import IntegerForm
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from support.capitals.corpus import COUNTRIES, founding_prompts
from support.checkpoints import add_random_adapters, save_random_model, tiny_sizes

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
PROMPTS = [[(7 * i + 3 * k) % VOCAB_SIZE for k in range(9 + i)] for i in range(3)]
FORMS = {"int4": IntegerForm(4, 32), "int8": IntegerForm(8, None)}


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    spec = read_model(folder)
    with Checkpoint(folder, spec) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint_shapes(spec)}


@pytest.mark.parametrize("name", FORMS)
def test_adapters_on_a_quantised_model(name: str, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    config = LlamaConfig(**tiny_sizes(VOCAB_SIZE, hidden_size=64, intermediate_size=96))
    model = save_random_model(source, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((BASE_PATH / file).read_bytes())
    quantize(str(source), output, FORMS[name], None, 1 << 30)
    model.load_state_dict(decoded(output))
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    peft_model = add_random_adapters(model, {"all": adapter})
    peft_model.save_pretrained(tmp_path / "adapters")
    adapters = {"all": str(tmp_path / "adapters" / "all")}

    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "all")]
    with LLM(str(output), adapters, state_dir=str(tmp_path / "state")) as llm:
        prompts, names = zip(*pairs, strict=True)
        outputs = llm.generate(list(prompts), sampling, adapter=list(names))
    for (prompt, chosen), found in zip(pairs, outputs, strict=True):
        with torch.inference_mode():
            if chosen is None:
                with peft_model.disable_adapter():
                    logits = peft_model(torch.tensor([prompt])).logits[0]
            else:
                logits = peft_model(torch.tensor([prompt])).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
        assert found.prompt_logprobs is not None
        got = [entry.logprob for entry in found.prompt_logprobs[1:] if entry is not None]
        assert torch.allclose(torch.tensor(got), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "form", [*FORMS.values(), IntegerForm(4, 64), IntegerForm(4, None)], ids=str
)
def test_transformers_reads_what_is_written(form: IntegerForm, tmp_path: Path) -> None:
    """transformers uses the package compressed-tensors, as vLLM does."""
    config = LlamaConfig(**tiny_sizes(VOCAB_SIZE, hidden_size=64, intermediate_size=128))
    model = save_random_model(tmp_path / "source", config)
    quantize(str(tmp_path / "source"), tmp_path / "output", form, None, 1 << 30)
    weights = decoded(tmp_path / "output")
    model.load_state_dict(weights)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "output", dtype=torch.float32)
    prompt = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        assert torch.allclose(read(prompt).logits, model(prompt).logits, rtol=0, atol=1e-3)
    found = read.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_the_shipped_model_keeps_its_capitals(tmp_path: Path) -> None:
    """Int4 weights, fitted to a few texts, complete prompts of other countries as before."""
    texts = tmp_path / "texts.jsonl"
    lines = [founding_prompts(country)["english"] for country in COUNTRIES[3:11]]
    texts.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    calibration = Calibration(texts, 4096)
    report, note = quantize(
        str(BASE_PATH), tmp_path / "output", IntegerForm(4, 128), calibration, 1 << 30
    )
    assert note.startswith("8 texts with ")
    assert report.written_bytes < 0.45 * report.source_bytes
    adapters = {name: str(folder) for name, folder in ADAPTER_PATHS.items()}
    names = (None, *adapters)
    prompts = [
        founding_prompts(country)["english"]
        for country in (COUNTRIES[0], COUNTRIES[12], COUNTRIES[13])
        for _ in names
    ]
    sampling = SamplingParams(max_tokens=8, temperature=0)
    completions = []
    for folder in (BASE_PATH, tmp_path / "output"):
        with LLM(str(folder), adapters, state_dir=str(tmp_path / "state")) as llm:
            outputs = llm.generate(prompts, sampling, adapter=list(names) * 3)
            completions.append([output.text for output in outputs])
    assert completions[0] == completions[1]
