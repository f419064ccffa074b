"""A random adapter of one LoRA module of TensorRT-LLM, as its clients send it."""

import math
from typing import Any

import torch

from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.models.spec import ModelSpec

RANK = 2


def one_module(spec: ModelSpec, layer: int, module_id: int, task_id: int) -> dict[str, Any]:
    """Return the arguments of `LLM.generate`: A, then B, of each expert if the module has them.

    A base without the module gets a row of any size, which it must refuse.
    """
    shapes, num_experts = spec.layers[layer].module_shapes, spec.layers[layer].num_experts
    parts = LORA_MODULES[module_id].parts_in(shapes)
    in_features = shapes[parts[0]][0] if parts else 1
    out_features = sum(shapes[part][1] for part in parts)
    count = math.prod(num_experts.get(part, 1) for part in parts)
    random = torch.Generator().manual_seed(module_id)
    num_values = count * RANK * (in_features + out_features)
    return {
        "lora_task_id": task_id,
        "lora_weights": torch.randn(1, num_values, generator=random),
        "lora_config": torch.tensor([[module_id, layer, RANK]], dtype=torch.int32),
    }
