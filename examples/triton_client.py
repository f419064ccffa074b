"""Triton's own client: one completion over HTTP, and a stream of tokens over gRPC.

    pip install 'tritonclient[all]'
    python examples/triton_client.py --http localhost:8000 --grpc localhost:8001 --task-id 1

`ensemble` takes and returns texts, as in the repositories of TensorRT-LLM's backend. A request
names its adapter by `lora_task_id`; without one it uses the base model.
"""

import argparse
import queue
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

PROMPT = r"美国的首都在哪里? \n答案:"
MAX_TOKENS = 16
TIMEOUT_SECONDS = 60


def inputs(client: Any, task_id: int | None, stream: bool) -> list[Any]:
    """Return the tensors of a request. client: either of tritonclient's two modules."""
    values = {
        "text_input": np.array([[PROMPT.encode()]], dtype=np.object_),
        "max_tokens": np.array([[MAX_TOKENS]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "top_k": np.array([[1]], dtype=np.int32),
        "stream": np.array([[stream]], dtype=np.bool_),
        "exclude_input_in_output": np.array([[True]], dtype=np.bool_),
    }
    if task_id is not None:
        values["lora_task_id"] = np.array([[task_id]], dtype=np.uint64)
    types = {"object": "BYTES", "int32": "INT32", "float32": "FP32", "bool": "BOOL"}
    tensors = []
    for name, value in values.items():
        kind = types.get(value.dtype.name, value.dtype.name.upper())
        tensors.append(client.InferInput(name, value.shape, kind))
        tensors[-1].set_data_from_numpy(value)
    return tensors


def text_of(result: Any) -> str:
    """Return the text in a response; the last response of a stream may have none."""
    values = result.as_numpy("text_output")
    return "" if values is None else values.flatten()[0].decode()


def infer_over_http(address: str, task_id: int | None) -> str:
    """Return the whole completion, from one response."""
    with triton_http.InferenceServerClient(address, network_timeout=TIMEOUT_SECONDS) as client:
        return text_of(client.infer("ensemble", inputs(triton_http, task_id, stream=False)))


def stream_over_grpc(address: str, task_id: int | None) -> None:
    """Print the completion as it comes."""
    responses: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    with triton_grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(
            "ensemble",
            inputs(triton_grpc, task_id, stream=True),
            # So a response without tokens marks the end of the stream.
            enable_empty_final_response=True,
        )
        while True:
            result, error = responses.get(timeout=TIMEOUT_SECONDS)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            print(text_of(result), end="", flush=True)
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    parser.add_argument("--task-id", type=int, default=1)
    args = parser.parse_args(arguments)
    try:
        print("HTTP, base model:", infer_over_http(args.http, None))
        print(f"HTTP, adapter {args.task_id}:", infer_over_http(args.http, args.task_id))
        print(f"gRPC, adapter {args.task_id}:", end=" ")
        stream_over_grpc(args.grpc, args.task_id)
    except InferenceServerException as error:
        print(f"the server refused the request: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
