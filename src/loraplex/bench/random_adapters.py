"""LoRA adapters of random numbers for any local model folder: only their cost is real.

Writes PEFT folders (adapter_config.json and adapter_model.safetensors) by itself. The shapes are
read from the headers of the model's safetensors files, so no model family has to be known.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loraplex.core.errors import ConfigError


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even. No value may be NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of a decoder layer."""

_WEIGHT = re.compile(
    rf"(?P<path>model\.layers\.\d+\.(?:self_attn|mlp)\.(?:{'|'.join(MODULES)}))\.weight"
)
_B_SCALE = 0.01
"""Standard deviation of B: small, so that the outputs stay those of a language model."""


class AdapterKind(msgspec.Struct, frozen=True, kw_only=True):
    """What random adapters have in common."""

    rank: int
    alpha: int
    modules: tuple[str, ...] = MODULES
    b_scale: float = _B_SCALE
    """Standard deviation of B; that of A is such that A x is as large as x's elements."""


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
    kind = AdapterKind(rank=rank, alpha=rank)
    names = [f"random-{index:04d}" for index in range(count)]
    for index, name in enumerate(names):
        write_random_adapter(folder / name, shapes, kind, seed=(seed, index))
    return names


def write_random_adapter(
    folder: Path, shapes: dict[str, Shape], kind: AdapterKind, *, seed: Collection[int]
) -> None:
    """Write one PEFT folder, which must not exist."""
    draws = np.random.default_rng([*seed])
    adapted = {
        path: shape for path, shape in shapes.items() if path.rpartition(".")[2] in kind.modules
    }
    tensors = {}
    for path, (out_features, in_features) in adapted.items():
        a = draws.standard_normal((kind.rank, in_features), dtype=np.float32)
        b = draws.standard_normal((out_features, kind.rank), dtype=np.float32)
        tensors[f"base_model.model.{path}.lora_A.weight"] = _half(a / np.float32(in_features**0.5))
        tensors[f"base_model.model.{path}.lora_B.weight"] = _half(b * np.float32(kind.b_scale))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in adapted}),
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "adapter_model.safetensors")


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """float16 numbers that are bfloat16 numbers, too: a server loses nothing with either."""
    return widen_bfloat16(to_bfloat16(values)).astype(np.float16)
