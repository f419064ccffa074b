"""A GGUF file of LoRA gives what PEFT gives, on a Hugging Face folder and on a GGUF base."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from loraplex import LLM, SamplingParams
from loraplex.app.llm_outputs import RequestOutput
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.stored_head import read_model
from support.checkpoints import add_random_adapters
from support.gguf_files import gguf_of_llama, gguf_of_lora

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(37 * index) % 1000 + 3 for index in range(24)]
SAMPLING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
CONFIG = LoraConfig(
    r=8,
    lora_alpha=4,
    target_modules=[
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "embed_tokens",
    ],
)


def log_probabilities(output: RequestOutput) -> torch.Tensor:
    """Return those of the prompt's tokens, without the first."""
    found = output.prompt_logprobs
    assert found is not None
    return torch.tensor([entry.logprob for entry in found[1:] if entry is not None])


@pytest.mark.parametrize("base_is_gguf", [False, True])
def test_a_gguf_adapter_is_the_peft_adapter(
    base_is_gguf: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = BASE_PATH
    model = AutoModelForCausalLM.from_pretrained(BASE_PATH, dtype=torch.float32)
    if base_is_gguf:
        base = tmp_path / "base-Q8_0.gguf"
        base.write_bytes(gguf_of_llama(BASE_PATH))
        folder = gguf_folder(base, tmp_path / "folders")
        spec = read_model(folder)
        with Checkpoint(folder, spec) as weights, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.read(name))
    peft_model = add_random_adapters(model, {"peft": CONFIG})
    peft_model.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    adapters = {"peft": str(tmp_path / "adapters" / "peft")}
    kinds = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "wrong": "F32"}
    for name, kind in kinds.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(
            gguf_of_lora(Path(adapters["peft"]), BASE_PATH, kind, permutes=name != "wrong")
        )
        adapters[name] = str(path)
    with torch.inference_mode():
        logits = peft_model(torch.tensor([PROMPT])).logits[0]
    of_prompt = torch.tensor(PROMPT[1:])[:, None]
    wanted = logits.log_softmax(-1)[:-1].gather(1, of_prompt).flatten()

    settings = {"state_dir": str(tmp_path / "state"), "dtype": "float32"}
    with LLM(str(base), adapters, **settings) as llm:
        outputs = llm.generate([PROMPT] * len(adapters), SAMPLING, adapter=list(adapters))
    # The PEFT folder names its base, whose folder is called base.
    other = "runs 'base-Q8_0' (stored as gguf): the same model with other rounding"
    assert (other in caplog.text) == base_is_gguf
    assert ("this server runs" in caplog.text) == base_is_gguf
    errors = {
        name: float((log_probabilities(output) - wanted).abs().max())
        for name, output in zip(adapters, outputs, strict=True)
    }
    assert max(errors["peft"], errors["f32"]) < 1e-3
    assert errors["wrong"] > 10 * max(errors[name] for name in ("f32", "f16", "q8_0"))
