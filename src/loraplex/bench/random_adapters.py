"""LoRA adapters of random numbers for any local model folder: what they cost is real, not what
they say.

Writes PEFT folders (adapter_config.json and adapter_model.safetensors) by itself. The shapes are
read from the headers of the model's safetensors files, so no model family has to be known.
"""

import json
import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loraplex.core.errors import ConfigError

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of a decoder layer."""

_WEIGHT = re.compile(
    rf"(?P<path>model\.layers\.\d+\.(?:self_attn|mlp)\.(?:{'|'.join(MODULES)}))\.weight"
)
_B_SCALE = 0.01
"""Standard deviation of B: small, so that the answers stay those of a language model."""

Shape = tuple[int, int]
"""(out_features, in_features), as in the file."""


def linear_shapes(model: Path) -> dict[str, Shape]:
    """The shapes of the linear layers in a model folder, by path. Raises ConfigError."""
    shapes: dict[str, Shape] = {}
    for file in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if match := _WEIGHT.fullmatch(name):
                        out_features, in_features = tensors.get_slice(name).get_shape()
                        shapes[match["path"]] = (out_features, in_features)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    if not shapes:
        raise ConfigError(
            f"{model} has no safetensors file with the linear layers of a decoder; random adapters "
            "need a local folder of such a model"
        )
    return shapes


def write_random_adapters(
    folder: Path, shapes: dict[str, Shape], *, count: int, rank: int, seed: int
) -> list[str]:
    """Write `count` PEFT folders of one rank into `folder`; gives their names."""
    names = [f"random-{index:04d}" for index in range(count)]
    for index, name in enumerate(names):
        _write_adapter(folder / name, shapes, rank, np.random.default_rng([seed, index]))
    return names


def _write_adapter(
    folder: Path, shapes: dict[str, Shape], rank: int, draws: np.random.Generator
) -> None:
    tensors = {}
    for path, (out_features, in_features) in shapes.items():
        a = draws.standard_normal((rank, in_features), dtype=np.float32) / np.sqrt(in_features)
        b = draws.standard_normal((out_features, rank), dtype=np.float32) * _B_SCALE
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.astype(np.float16)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.astype(np.float16)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in shapes}),
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")
