"""Input tensors of the Triton models, made with tritonclient, for tests of either wire.

`module` is tritonclient.http or tritonclient.grpc: their tensors have one interface.
"""

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

Array = npt.NDArray[Any]

TRUE = np.array([[True]])


def i32(*values: int) -> Array:
    """Shape [1, len(values)]."""
    return np.array([values], dtype=np.int32)


def f32(*values: float) -> Array:
    """Shape [1, len(values)]."""
    return np.array([values], dtype=np.float32)


def tensors(module: ModuleType, **arrays: Array) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def text_request(
    module: ModuleType, prompt: str = "hi", max_tokens: int = 50, **more: Array
) -> list[Any]:
    """Return the tensors of a request to `ensemble`."""
    text = np.array([[prompt]], dtype=object)
    return tensors(module, text_input=text, max_tokens=i32(max_tokens), **more)


def token_request(
    module: ModuleType, prompt: bytes = b"hi", length: int = 50, **more: Array
) -> list[Any]:
    """Return the tensors that inflight_batcher_llm_client.py always sends, greedy."""
    more.setdefault("end_id", i32(257))
    return tensors(
        module,
        input_ids=i32(*prompt),
        input_lengths=i32(len(prompt)),
        request_output_len=i32(length),
        beam_width=i32(1),
        temperature=f32(1.0),
        pad_id=i32(258),
        runtime_top_k=i32(1),
        runtime_top_p=f32(0.0),
        **more,
    )


def bf16_tensor(module: ModuleType, name: str, bits: Array) -> Any:
    """A BF16 input from its bit patterns, as uint16.

    Versions of tritonclient do not agree on what array they take for this type, so it is made as
    the other type of two bytes and renamed.
    """
    tensor = module.InferInput(name, bits.shape, "FP16")
    tensor.set_data_from_numpy(bits.view(np.float16))
    if hasattr(tensor, "_input"):
        tensor._input.datatype = "BF16"  # gRPC's holds its protobuf message
    else:
        tensor._datatype = "BF16"
    return tensor
