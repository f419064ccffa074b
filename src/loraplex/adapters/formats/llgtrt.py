"""LoRA file of llgtrt: TensorRT-LLM's tensors as `weights` and `config` of a .safetensors file.

scripts/extract_lora.py of llgtrt writes such files. The tensors are not interpreted here.
"""

from loraplex.adapters.tensor_file import RawTensor, SafetensorsContent, encode_header

WEIGHTS = "weights"
CONFIG = "config"


def is_lora_file(content: SafetensorsContent) -> bool:
    """Whether a .safetensors file is one of llgtrt's."""
    return set(content.tensors) == {WEIGHTS, CONFIG}


def lora_tensors(content: SafetensorsContent) -> tuple[RawTensor, RawTensor]:
    """Return (lora_weights, lora_config) of such a file."""
    return content.tensors[WEIGHTS], content.tensors[CONFIG]


def encode_lora_file(weights: RawTensor, config: RawTensor) -> list[bytes | bytearray | memoryview]:
    """Return the pieces of a file: weights [N, W] and config [N, 3], without a batch dimension."""
    tensors = {
        WEIGHTS: RawTensor(weights.dtype, weights.shape[-2:], weights.data),
        CONFIG: RawTensor(config.dtype, config.shape[-2:], config.data),
    }
    return [encode_header(tensors, {}), *(tensor.data for tensor in tensors.values())]
