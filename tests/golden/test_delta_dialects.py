"""Adapters of a delta rule in the names of other tools, against transformers and PEFT."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex import LLM, SamplingParams
from loraplex.demo import BASE_PATH
from support.checkpoints import add_random_adapters, save_random_model
from support.families import hybrids

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(37 * k) % 1000 + 3 for k in range(70)]
SAMPLING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
Tensors = dict[str, torch.Tensor]
Rewrite = Callable[[str, torch.Tensor, torch.Tensor], Mapping[str, tuple[torch.Tensor, ...]]]


def split(module: str, a: torch.Tensor, b: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, ...]]:
    """Return q, k and v apart, each with an A of its own."""
    if module != "in_proj_qkv":
        return {module: (a, b)}
    sizes = [24, 24, 40]
    parts = zip("qkv", b.split(sizes), strict=True)
    return {f"in_proj_{part}": (a.clone(), own.clone()) for part, own in parts}


NEXT = {
    "in_proj_qkvz": {"in_proj_q": 12, "in_proj_k": 12, "in_proj_v": 20, "in_proj_z": 20},
    "in_proj_ba": {"in_proj_b": 2, "in_proj_a": 2},
}
"""Outputs of each part of one key head of Qwen3-Next."""


def split_next(
    module: str, a: torch.Tensor, b: torch.Tensor
) -> Mapping[str, tuple[torch.Tensor, ...]]:
    """Return the parts of Qwen3-Next's inputs apart, each with another A."""
    sizes = NEXT.get(module)
    if sizes is None:
        return {module: (a, b)}
    heads = b.view(2, -1, b.shape[1]).split(list(sizes.values()), dim=1)
    return {
        part: (a * 2.0**place, own.flatten(0, 1) / 2.0**place)
        for place, (part, own) in enumerate(zip(sizes, heads, strict=True))
    }


def rewritten(folder: Path, target: Path, rewrite: Rewrite) -> Path:
    """Write an adapter with other names of a delta rule's inputs."""
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    config["target_modules"] = "all-linear"
    (target / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(target / "adapter_model.safetensors")
    found: Tensors = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path, _, module = name.removesuffix(".lora_A.weight").rpartition(".")
        b = tensors[name.replace("lora_A", "lora_B")]
        for own, (own_a, own_b) in rewrite(module, a, b).items():
            found[f"{path}.{own}.lora_A.weight"] = own_a
            found[f"{path}.{own}.lora_B.weight"] = own_b
    save_file(found, target / "adapter_model.safetensors")
    return target


def fused(folder: Path, target: Path) -> Path:
    """Write an adapter whose inputs have one A, as SGLang has them."""
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    config["target_modules"] = "all-linear"
    (target / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(target / "adapter_model.safetensors")
    found: Tensors = {}
    wholes = {
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
    for name, tensor in tensors.items():
        path, _, end = name.partition("linear_attn.in_proj_")
        if not end:
            found[name] = tensor
            continue
        for whole, (first, second) in wholes.items():
            prefix = f"{path}linear_attn."
            a, b = (f"{prefix}{first}.lora_{factor}.weight" for factor in "AB")
            other = f"{prefix}{second}.lora_B.weight"
            found[f"{prefix}{whole}.lora_A.weight"] = tensors[a].clone()
            found[f"{prefix}{whole}.lora_B.weight"] = torch.cat([tensors[b], tensors[other]])
    save_file(found, target / "adapter_model.safetensors")
    return target


def test_each_dialect_is_the_adapter_that_was_trained(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = save_random_model(base, hybrids.qwen3_5(vocab_size=1024))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, base)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    peft_model = add_random_adapters(model, {"peft": config})
    with torch.no_grad():  # the fused dialect has one A for q, k, v and z, and one for b and a
        for layer in peft_model.base_model.model.model.layers:
            if hasattr(layer, "linear_attn"):
                mixer = layer.linear_attn
                for first, second in (("qkv", "z"), ("b", "a")):
                    one, other = (getattr(mixer, f"in_proj_{part}") for part in (first, second))
                    other.lora_A["peft"].weight.copy_(one.lora_A["peft"].weight)
    peft_model.save_pretrained(tmp_path / "adapters")
    trained = tmp_path / "adapters" / "peft"
    adapters = {
        "peft": str(trained),
        "split": str(rewritten(trained, tmp_path / "split", split)),
        "fused": str(fused(trained, tmp_path / "fused")),
    }
    check(base, peft_model, adapters, tmp_path)


def test_split_inputs_of_qwen3_next(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = save_random_model(base, hybrids.qwen3_next(vocab_size=1024))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, base)
    targets = [*NEXT, "out_proj", "q_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    peft_model = add_random_adapters(model, {"peft": config})
    peft_model.save_pretrained(tmp_path / "adapters")
    trained = tmp_path / "adapters" / "peft"
    adapters = {
        "peft": str(trained),
        "split": str(rewritten(trained, tmp_path / "split", split_next)),
    }
    check(base, peft_model, adapters, tmp_path)


def check(base: Path, peft_model: Any, adapters: dict[str, str], folder: Path) -> None:
    """Check that each adapter computes what the trained one computes."""
    with torch.inference_mode():
        logits = peft_model(torch.tensor([PROMPT])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).flatten()
    settings = {"state_dir": str(folder / "state"), "dtype": "float32"}
    with LLM(str(base), adapters, **settings) as llm:
        outputs = llm.generate([PROMPT] * len(adapters), SAMPLING, adapter=list(adapters))
    for output in outputs:
        assert output.prompt_logprobs is not None
        found = [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]
        assert torch.allclose(torch.tensor(found), wanted, rtol=0, atol=1e-3)
