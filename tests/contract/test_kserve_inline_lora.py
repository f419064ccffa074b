"""Adapters inside requests, as tritonclient sends them over both wires, before an EchoService."""

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from loraplex.core.principal import LOCAL
from support.triton_requests import TRUE, bf16_tensor, tensors, text_request, token_request

WEIGHTS = np.arange(1, 13, dtype=np.float32).reshape(1, 2, 6)
CONFIG = np.array([[[1, 0, 8], [2, 0, 8]]], dtype=np.int32)


def adapter(
    module: ModuleType,
    weights: np.ndarray = WEIGHTS,
    config: np.ndarray = CONFIG,
    task_id: int | None = None,
) -> list[Any]:
    """Weights of type uint16 are the bits of BF16."""
    inputs = tensors(module, lora_config=config)
    if weights.dtype == np.uint16:
        inputs.append(bf16_tensor(module, "lora_weights", weights))
    else:
        inputs += tensors(module, lora_weights=weights)
    return inputs if task_id is None else [*inputs, *task(module, task_id)]


def task(module: ModuleType, task_id: int) -> list[Any]:
    return tensors(module, lora_task_id=np.array([[task_id]], dtype=np.uint64))


def generate(wire: tuple[ModuleType, Any], more: list[Any], model: str = "ensemble") -> str:
    module, client = wire
    make = text_request if model == "ensemble" else token_request
    result = client.infer(model, [*make(module, exclude_input_in_output=TRUE), *more])
    if model == "ensemble":
        return result.as_numpy("text_output")[0].decode()
    return bytes(result.as_numpy("output_ids")[0, 0].tolist()).decode()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
@pytest.mark.parametrize("task_id", [0, 101, 2**64 - 1])
def test_first_with_weights_then_with_the_id_alone(wire, model, task_id):
    # TensorRT-LLM's text.
    with pytest.raises(InferenceServerException, match=f"LoRA task {task_id} not found in cache"):
        generate(wire, task(wire[0], task_id), model)
    expected = f"echo+{task_id}: hi"
    assert generate(wire, adapter(wire[0], task_id=task_id), model) == expected
    assert generate(wire, task(wire[0], task_id), model) == expected


def test_without_a_task_id(wire, backend):
    text = generate(wire, adapter(wire[0]))
    [card] = backend.adapters(LOCAL)
    assert text == f"echo+inline-{card.digest[:12]}: hi"


@pytest.mark.parametrize("has_batch", [True, False])
@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16"])
def test_every_type_and_shape_reaches_the_backend_as_it_was(
    wire, backend, datatype, columns, has_batch
):
    # Of these small numbers the upper half of a float32 is the bfloat16.
    bf16 = np.ascontiguousarray(WEIGHTS.view(np.uint16)[..., 1::2])
    weights = {"FP16": WEIGHTS.astype(np.float16), "FP32": WEIGHTS, "BF16": bf16}[datatype]
    config = np.pad(CONFIG, ((0, 0), (0, 0), (0, columns - 3)))
    sent = (weights, config) if has_batch else (weights[0], config[0])
    generate(wire, adapter(wire[0], *sent, task_id=1))
    [(got, got_config)] = backend.adapter_tensors
    assert (got.dtype, got.shape, bytes(got.view)) == (datatype, (2, 6), weights.tobytes())
    assert (got_config.dtype, got_config.shape) == ("INT32", (2, columns))
    assert bytes(got_config.view) == config.tobytes()


def test_other_weights_under_the_same_id(wire, backend):
    digests = []
    for weights in (WEIGHTS, WEIGHTS, WEIGHTS + 1):
        generate(wire, adapter(wire[0], weights, task_id=1))
        digests += [card.digest for card in backend.adapters(LOCAL)]
    assert len(digests) == 3
    assert digests[0] == digests[1] != digests[2]


def test_two_first_requests_at_once(wire, triton, backend):
    module = wire[0]
    address = triton.http if module is tritonclient.http else triton.grpc

    def generate_alone(weights: np.ndarray) -> str:
        with module.InferenceServerClient(address) as client:
            return generate((module, client), adapter(module, weights, task_id=9))

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(generate_alone, [WEIGHTS, WEIGHTS, WEIGHTS + 1, WEIGHTS + 1]))
    assert texts == ["echo+9: hi"] * 4
    assert [card.name for card in backend.adapters(LOCAL)] == ["9"]


def test_json_tensors(triton, backend):
    with tritonclient.http.InferenceServerClient(triton.http) as client:
        inputs = [tritonclient.http.InferInput("lora_weights", WEIGHTS.shape, "FP32")]
        inputs[0].set_data_from_numpy(WEIGHTS, binary_data=False)
        inputs.append(tritonclient.http.InferInput("lora_config", CONFIG.shape, "INT32"))
        inputs[1].set_data_from_numpy(CONFIG, binary_data=False)
        assert generate((tritonclient.http, client), inputs).startswith("echo+inline-")
    [(weights, config)] = backend.adapter_tensors
    assert bytes(weights.view) == WEIGHTS.tobytes()
    assert bytes(config.view) == CONFIG.tobytes()


def test_in_a_stream(triton):
    pieces: list[str] = []
    errors: list[Exception] = []

    def receive(result, error) -> None:
        if error is not None:
            errors.append(error)
        elif (output := result.as_numpy("text_output")) is not None:
            pieces.append(output[0].decode())

    module = tritonclient.grpc
    with module.InferenceServerClient(triton.grpc) as client:
        client.start_stream(receive)
        inputs = [*text_request(module, stream=TRUE), *adapter(module, task_id=4)]
        client.async_stream_infer("ensemble", inputs, request_id="1")
        client.stop_stream()
    assert errors == []
    assert "".join(pieces) == "echo+4: hi"
