"""Adapters on bases that are quantised already, against transformers and PEFT on what is decoded.

Float32: log probabilities within a thousandth, and the same bits in a mixed batch as alone.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.app.llm_outputs import RequestOutput
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from support.checkpoints import add_random_adapters, save_random_model, tiny_sizes
from support.examples import quick_and_slow
from support.families import hybrids, latent
from support.families.experts import gpt_oss
from support.gguf_files import gguf_of_llama
from support.quantized_checkpoints import (
    CASES,
    DELTA_WEIGHTS,
    encode_experts,
    quantize_folder,
)
from support.reference_quantizers import QUANTIZERS

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 199
CONFIG = LlamaConfig(**tiny_sizes(VOCAB_SIZE, intermediate_size=96))
ADAPTERS = {
    "plain": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "wide": LoraConfig(r=7, lora_alpha=8, target_modules=["v_proj", "o_proj", "up_proj"]),
    "dora": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_dora=True),
}
PROMPTS = [[(7 * i + 3 * k) % VOCAB_SIZE for k in range(9 + i)] for i in range(3)]
SAMPLING = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=0)
QUICK = ("gptq-4-order", "bnb-nf4-double", "ct-mixed")
TESTED = quick_and_slow(QUICK, sorted(QUANTIZERS.keys() - set(QUICK)))


TOLERANCE = 1e-3


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a folder as float32."""
    spec = read_model(folder)
    with Checkpoint(folder, spec) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint_shapes(spec)}


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
    QUANTIZERS[name](tmp_path)
    check_adapters(tmp_path, tmp_path, model, tmp_path)


DELTA_ADAPTERS = {
    "plain": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "dora": LoraConfig(
        r=4,
        lora_alpha=8,
        use_dora=True,
        target_modules=["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    ),
}


@pytest.mark.parametrize(
    "name", quick_and_slow(("fp8-block", "gptq-4-order"), ("awq-gemm", "ct-int4-order"))
)
def test_adapters_on_a_quantised_recurrence(name: str, tmp_path: Path) -> None:
    """The small layers of a delta rule and its convolution stay as they are."""
    config = hybrids.qwen3_5(vocab_size=VOCAB_SIZE, linear_key_head_dim=12, linear_value_head_dim=8)
    model = save_random_model(tmp_path, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, tmp_path)
    quantize_folder(tmp_path, CASES[name], names=DELTA_WEIGHTS)
    # A recurrence enlarges what products round.
    check_adapters(tmp_path, tmp_path, model, tmp_path, DELTA_ADAPTERS, 5 * TOLERANCE)


LATENT_SIZES = {"q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 12, "qk_rope_head_dim": 4}
"""Sizes that groups of 16 inputs divide, where they are inputs."""
LATENT_ADAPTERS = {
    "plain": LoraConfig(r=4, lora_alpha=8, target_modules=r".*self_attn\..*_proj(_with_mqa)?"),
    "dora": LoraConfig(
        r=4, lora_alpha=8, use_dora=True, target_modules=r".*self_attn\.(q_b|kv_b|o)_proj"
    ),
}


@pytest.mark.parametrize(
    "name", quick_and_slow(("fp8-block",), ("not quantised", "gptq-4-order", "ct-int4-order"))
)
def test_adapters_on_quantised_latent_attention(name: str, tmp_path: Path) -> None:
    """The layer that absorption takes apart is stored like the others, and decoded for it."""
    config = latent.deepseek_2(vocab_size=VOCAB_SIZE, first_k_dense_replace=4, **LATENT_SIZES)
    model = save_random_model(tmp_path, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, tmp_path)
    if name in CASES:
        decoded = quantize_folder(tmp_path, CASES[name], names=("_proj.weight", "_mqa.weight"))
        assert sum(weight.endswith("kv_b_proj.weight") for weight in decoded) == 4
    check_adapters(tmp_path, tmp_path, model, tmp_path, LATENT_ADAPTERS)


GGUF_MIXES = {
    "Q2_K": {"v_proj": "Q3_K", "down_proj": "Q3_K", "lm_head": "Q6_K", "": "Q2_K"},
    "Q3_K_M": {"v_proj": "Q5_K", "down_proj": "Q4_K", "": "Q3_K"},
    "IQ4_XS": {"v_proj": "Q5_K", "down_proj": "IQ4_NL", "": "IQ4_XS"},
}


@pytest.mark.parametrize("name", quick_and_slow(("Q2_K", "IQ4_XS"), ["Q3_K_M"]))
def test_adapters_on_gguf_mixes(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**tiny_sizes(1024, **sizes, **heads))
    model = save_random_model(tmp_path / "original", config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, tmp_path / "original")
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(gguf_of_llama(tmp_path / "original", GGUF_MIXES[name]))
    check_adapters(path, gguf_folder(path, tmp_path / "folders"), model, tmp_path)


def check_adapters(
    path: Path,
    folder: Path,
    model: Any,
    tmp_path: Path,
    configs: Mapping[str, LoraConfig] = ADAPTERS,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare the model of a path, with and without adapters, with `model` with its weights."""
    # Unit tests compare these, to the bit, with what the program itself decodes.
    model.load_state_dict(read_weights(folder))
    peft_model = add_random_adapters(model, configs)
    peft_model.save_pretrained(tmp_path / "adapters")
    adapters = {adapter: str(tmp_path / "adapters" / adapter) for adapter in configs}

    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, *configs)]
    prompts, names = [prompt for prompt, _ in pairs], [adapter for _, adapter in pairs]
    settings = {"state_dir": str(tmp_path / "state"), "enable_prefix_cache": False}
    with LLM(str(path), adapters, dtype="float32", **settings) as llm:
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
            assert torch.allclose(got, wanted.flatten(), rtol=0, atol=tolerance)


def swapped(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes with their halves exchanged, of the type that they are stored as."""
    data = codes.view(torch.uint8)
    return (data >> 4 | data << 4).view(codes.dtype)


WRONG: Mapping[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "halves of bytes in NF4": ("bnb-nf4-double", ".weight", swapped),
    "halves of bytes in NVFP4": ("ct-nvfp4", ".weight_packed", swapped),
    "halves of bytes in MXFP4": ("ct-mxfp4", ".weight_packed", swapped),
    "the zeros of GPTQ": ("gptq-4-v2", ".qzeros", lambda zeros: zeros ^ 0x11111111),
    "the zeros of AWQ": ("awq-gemm", ".qzeros", lambda zeros: zeros ^ 0x11111111),
    "the order of outputs in AWQ": ("awq-gemm", ".qweight", lambda words: words.roll(1, 1)),
    "the order of inputs in GPTQ": ("gptq-4-order", ".g_idx", lambda groups: groups.sort()[0]),
    "a sign in compressed-tensors": ("ct-int4", ".weight_packed", lambda words: words ^ 0x11111111),
    "the scales of FP8": ("fp8-block", ".weight_scale_inv", torch.reciprocal),
    "the scale of NVFP4": ("modelopt-nvfp4", ".weight_scale_2", torch.reciprocal),
    "the exponents of MXFP8": ("ct-mxfp8", ".weight_scale", lambda exponents: exponents + 1),
    "the scales of LLM.int8": ("bnb-int8", ".SCB", lambda scales: scales.roll(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_place_is_far_off(name: str, tmp_path: Path) -> None:
    case, end, change = WRONG[name]
    model = save_random_model(tmp_path, CONFIG)
    original = log_softmax(model)
    QUANTIZERS[case](tmp_path)
    model.load_state_dict(read_weights(tmp_path))
    right = log_softmax(model)
    stored = load_file(tmp_path / "model.safetensors")
    codes = next(part for part in stored if part.endswith(f"0.self_attn.o_proj{end}"))
    stored[codes] = change(stored[codes]).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    model.load_state_dict(read_weights(tmp_path))
    assert (log_softmax(model) - right).abs().max() > 10 * TOLERANCE
    assert (original - right).abs().max() > 10 * TOLERANCE


@torch.inference_mode()
def log_softmax(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor(PROMPTS[:1])).logits
    return logits.log_softmax(-1)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """The experts stay in 4 bits, whose table is whole numbers: nothing is rounded but inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = save_random_model(tmp_path, gpt_oss(**sizes))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, tmp_path)
    state = model.state_dict()
    for name, (gate, up, down) in encode_experts(tmp_path).items():
        state[f"{name}.gate_up_proj"] = torch.stack((gate, up), 2).flatten(1, 2).mT
        state[f"{name}.down_proj"] = down.mT
    model.load_state_dict(state)
    prompt = [(7 * i) % model.config.vocab_size for i in range(20)]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
    with LLM(str(tmp_path), state_dir=str(tmp_path / "state")) as llm:
        (output,) = llm.generate([prompt], SAMPLING)
    got = torch.tensor(log_probabilities(output))
    assert torch.allclose(got, wanted, rtol=0, atol=TOLERANCE)


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
