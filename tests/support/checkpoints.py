"""Tiny random checkpoints and adapters, made with transformers and PEFT for tests and benchmarks.

Needs the `dev` extra: nothing that serves imports this file.
"""

import copy
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex.core.adapter import LoraTarget
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight

_PARAMETER_SCALE = 0.15
_MAX_SAVED = 8
_NORM_WEIGHT = re.compile(r"norm|ln_\w+\.weight$")
_LORA_MODULE = re.compile(r"(?:layers\.(\d+)\.(?:self_attn|mlp)|\.h\.(\d+))\.(\w+|\w+\.\w+)$")


def tiny_sizes(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """Fields that every family's configuration takes; the key heads are shared by two."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    } | changes


def tiny_families(vocab_size: int) -> dict[str, PretrainedConfig]:
    """One configuration of each model family."""
    sizes = tiny_sizes(vocab_size)
    return {
        "llama": LlamaConfig(**sizes),
        "mistral-window": MistralConfig(**sizes, sliding_window=13),
        "qwen2-windows": Qwen2Config(
            **sizes,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
        ),
        "qwen3": Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True),
        "gpt2": tiny_gpt2(vocab_size),
    }


def tiny_gpt2(vocab_size: int, **changes: Any) -> GPT2Config:
    """Return the sizes of `tiny_sizes` under GPT-2's own names."""
    sizes = {"n_embd": 64, "n_inner": 112, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ids = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None}
    return GPT2Config(**(sizes | ids | changes))


class _SavedModel(NamedTuple):
    model: Any
    files: Mapping[str, bytes]
    random_state: torch.Tensor
    """State of torch's generator after the parameters were drawn."""


_saved: dict[tuple[type, str, int], _SavedModel] = {}
"""The latest models of this process by class and text of their configuration and by seed."""


def save_random_model(folder: Path, config: PretrainedConfig, *, seed: int = 0) -> Any:
    """Write a checkpoint with every parameter random, norms and biases too; returns the model.

    The weights are float32; config.json states `config.dtype`. Equal arguments have equal results,
    which are made once.
    """
    key = type(config), config.to_json_string(use_diff=False), seed
    saved = _saved.pop(key, None) or _random_model(config, seed)
    _saved[key] = saved
    if len(_saved) > _MAX_SAVED:
        del _saved[next(iter(_saved))]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in saved.files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(saved.random_state)
    return copy.deepcopy(saved.model)


def _random_model(config: PretrainedConfig, seed: int) -> _SavedModel:
    torch.default_generator.manual_seed(seed)
    models: Any = AutoModelForCausalLM
    model = models.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if _NORM_WEIGHT.search(name) else 0.0
            parameter.copy_(mean + _PARAMETER_SCALE * torch.randn_like(parameter))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return _SavedModel(model.eval(), files, torch.get_rng_state())


def add_random_adapters(
    model: Any, adapters: Mapping[str, LoraConfig], *, seed: int = 0
) -> PeftModel:
    """The model wrapped by PEFT, with random A and B for each named adapter."""
    torch.default_generator.manual_seed(seed)
    names = list(adapters)
    peft_model = get_peft_model(model, adapters[names[0]], adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, adapters[name])
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(_PARAMETER_SCALE * torch.randn_like(parameter))
    return peft_model.eval()


def host_adapter(model: PeftModel, name: str) -> HostAdapter:
    """A LoRA adapter of the PEFT model, as the loader would put it into host memory."""
    weights = []
    for path, module in model.named_modules():
        match = _LORA_MODULE.search(path)
        if match is None or name not in getattr(module, "lora_A", {}):
            continue
        a = module.lora_A[name].weight.detach().clone()
        b = module.lora_B[name].weight.detach().clone()
        target = LoraTarget(int(match[1] or match[2]), match[3], a.shape[0], a.shape[1], b.shape[0])
        weights.append(HostWeight(target, a, b, float(module.scaling[name])))
    return HostAdapter(name, tuple(sorted(weights, key=lambda weight: weight.target)))
