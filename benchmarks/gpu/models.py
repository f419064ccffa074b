"""The models of the benchmark: shapes of Llamas, random weights made on the device."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.assembly import Assembly
from loraplex.execution.loading import assemble_parts, start_runner
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.kernels.dispatch import select_accelerator, select_kernels
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.models.parameters import LinearPlace, build_parameters
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec

_SPREAD = 0.02

LLAMA_3_1_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_2_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-2-7b": LLAMA_2_7B,
    "tiny": TINY,
}


def hf_config(name: str, dtype: str) -> dict[str, Any]:
    """Return the content of a Hugging Face config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **SHAPES[name],
    }


def decoder_config(name: str, dtype: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(name, dtype)))
        return read_config(Path(folder))


@dataclasses.dataclass
class RandomWeights:
    """Implements models.parameters.ParameterSource: nothing is read, nothing crosses the bus."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    precision: WeightPrecision = WeightPrecision.NATIVE

    def tensor(
        self, _name: str, shape: tuple[int, ...], _num_rows: int | None = None
    ) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return self._random(shape)

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding:
            return None
        return self.kernels.pack_linear(self._random(place.shape), None, self.precision)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, _SPREAD)


def random_runner(
    config: ModelSpec, dtype: str, settings: RunnerSettings, host: HostAdapters
) -> ModelRunner:
    """A runner of random weights, sized and recorded as at the start of a server."""
    torch.manual_seed(0)
    device, kind = torch.device(settings.device), getattr(torch, dtype)
    accelerator = select_accelerator(device)
    kernels = select_kernels(device, accelerator, batch_invariant=settings.batch_invariant)
    parameters = build_parameters(config, RandomWeights(kernels, device, kind))
    assembly = Assembly(
        spec=windowed(settings, config),
        parameters=parameters,
        weights_bytes=all_weights(config) * kind.itemsize,
        settings=settings,
        kernels=kernels,
        accelerator=accelerator,
    )
    return start_runner(assemble_parts(assembly, host), settings)


def all_weights(config: ModelSpec) -> int:
    """Elements."""
    return step_bytes(config, 1) + config.vocab_size * config.hidden_size


QKV = ("q_proj", "k_proj", "v_proj")
MODULES = {
    "qkv": QKV,
    "qkvo": (*QKV, "o_proj"),
    "all": (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def step_bytes(config: ModelSpec, itemsize: int) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding table."""
    layers = sum(
        rows * columns for shapes in config.module_shapes for rows, columns in shapes.values()
    )
    return (layers + config.vocab_size * config.hidden_size) * itemsize


def adapter_bytes(config: ModelSpec, rank: int, modules: str, itemsize: int) -> int:
    features = sum(
        sum(shapes[module])
        for shapes in config.module_shapes
        for module in MODULES[modules]
        if module in shapes
    )
    return rank * features * itemsize


def kv_bytes(config: ModelSpec, itemsize: int) -> int:
    """Bytes of one position."""
    return 2 * sum(attention.kv_size for attention in config.mixers_of(AttentionSpec)) * itemsize
