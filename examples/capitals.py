"""The founding example: two prompts, each to the base and to two adapters, in one batch.

Starts a server with the model that ships with loraplex, sends the six requests at once through
Triton's own gRPC client, and shows the results. Exit code 0 only if all six completions are right.

    python examples/capitals.py
"""

import asyncio
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton
from tokenizers import Tokenizer

from loraplex import demo, testing

# The exact texts of the founding example: a backslash and an n, not a line break.
CHINESE_PROMPT = r"美国的首都在哪里? \n答案:"
JAPANESE_PROMPT = r"アメリカ合衆国の首都はどこですか? \n答え:"
EXPECTED = {"base": "Washington, D.C.", "chinese": "华盛顿", "japanese": "ワシントン D.C."}
TASK_IDS = {"base": None, "chinese": 1, "japanese": 2}
MAX_TOKENS = 10
END_TOKEN = "</s>"


@dataclass
class Completion:
    """One request and what came back."""

    prompt: str
    adapter: str
    token_ids: list[int]
    text: str
    first_token_seconds: float

    @property
    def is_right(self) -> bool:
        return self.text.strip() == EXPECTED[self.adapter]


@contextlib.contextmanager
def running_server() -> Iterator[testing.RunningServer]:
    """`loraplex serve` with the shipped model on free ports, from ready to stopped."""
    command = [sys.executable, "-m", "loraplex", "serve", str(demo.BASE_PATH)]
    for name, task_id in TASK_IDS.items():
        if task_id is not None:
            command += ["--adapter", f"{name}={demo.ADAPTER_PATHS[name]},task_id={task_id}"]
    command += [
        *testing.PORT_FLAGS,
        "--log-level",
        "warning",
        "--max-queue-delay-microseconds",
        "50000",
    ]
    with testing.running(command, sys.stdout) as server:
        yield server
        if (status := server.stop()) != 0:
            raise RuntimeError(f"the server ended with status {status}")


def get(http_port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}{path}", timeout=10) as response:
        body: bytes = response.read()
        return body


def tensor(
    name: str, values: list[int] | list[float] | list[bool], dtype: type
) -> triton.InferInput:
    array: npt.NDArray[Any] = np.array([values], dtype=dtype)
    tensor_types = {np.int32: "INT32", np.float32: "FP32", np.uint64: "UINT64", np.bool_: "BOOL"}
    infer_input = triton.InferInput(name, list(array.shape), tensor_types[dtype])
    infer_input.set_data_from_numpy(array)
    return infer_input


def request_tensors(
    token_ids: list[int], end_id: int, task_id: int | None
) -> list[triton.InferInput]:
    """What inflight_batcher_llm_client.py sends for `--top-k 0 --top-p 0.5`, greedily here."""
    inputs = [
        tensor("input_ids", token_ids, np.int32),
        tensor("input_lengths", [len(token_ids)], np.int32),
        tensor("request_output_len", [MAX_TOKENS], np.int32),
        tensor("end_id", [end_id], np.int32),
        tensor("pad_id", [end_id], np.int32),
        tensor("beam_width", [1], np.int32),
        tensor("runtime_top_k", [1], np.int32),
        tensor("temperature", [1.0], np.float32),
        tensor("streaming", [True], np.bool_),
    ]
    if task_id is not None:
        inputs.append(tensor("lora_task_id", [task_id], np.uint64))
    return inputs


async def generate(
    client: triton.InferenceServerClient, tokenizer: Tokenizer, prompt: str, adapter: str
) -> Completion:
    """Stream one completion."""
    prompt_ids = tokenizer.encode(prompt).ids
    end_id = tokenizer.token_to_id(END_TOKEN)
    assert end_id is not None

    async def requests() -> AsyncIterator[dict[str, object]]:
        inputs = request_tensors(prompt_ids, end_id, TASK_IDS[adapter])
        yield {"model_name": "tensorrt_llm", "inputs": inputs, "request_id": adapter}

    started = time.perf_counter()
    first_token_seconds = 0.0
    token_ids: list[int] = []
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        new_ids = result.as_numpy("output_ids")
        if new_ids is None:
            continue
        first_token_seconds = first_token_seconds or time.perf_counter() - started
        token_ids += [int(token_id) for token_id in new_ids.flatten()]
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Completion(prompt, adapter, token_ids, text, first_token_seconds)


async def warm_up(grpc_port: int, tokenizer: Tokenizer) -> None:
    """Send a first request of each adapter with a dummy prompt, as the founding example does."""
    async with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        for adapter in demo.ADAPTER_PATHS:
            await generate(client, tokenizer, "dummy", adapter)


async def generate_all(grpc_port: int, tokenizer: Tokenizer) -> list[Completion]:
    """Send two prompts, each to the base and to both adapters, all at once."""
    pairs = [
        (prompt, adapter) for prompt in (CHINESE_PROMPT, JAPANESE_PROMPT) for adapter in EXPECTED
    ]
    async with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        return await asyncio.gather(
            *(generate(client, tokenizer, prompt, adapter) for prompt, adapter in pairs)
        )


def steps_after(http_port: int, step_id: int) -> list[dict[str, int]]:
    """The steps with rows that the engine has run since."""
    steps: list[dict[str, int]] = json.loads(get(http_port, "/v1/iterations?limit=1000"))
    return [step for step in steps if step["step_id"] > step_id and step["num_rows"]]


def show(completions: list[Completion], steps: list[dict[str, int]]) -> None:
    for completion in completions:
        mark = (
            "right" if completion.is_right else f"WRONG, expected {EXPECTED[completion.adapter]!r}"
        )
        print(f"prompt    {completion.prompt}")
        print(f"adapter   {completion.adapter}")
        print(f"output    {completion.text.strip()}  ({mark})")
        print(f"tokens    {completion.token_ids}")
        print(f"first     {completion.first_token_seconds * 1000:.0f} ms\n")
    sizes = " ".join(str(step["num_rows"]) for step in steps)
    adapters = max((step["num_adapters"] for step in steps), default=0)
    print(f"batch sizes of the steps: {sizes}  (up to {adapters} adapters in addition to the base)")


def main() -> int:
    tokenizer = Tokenizer.from_file(str(demo.BASE_PATH / "tokenizer.json"))
    print("Starting loraplex with the shipped model and two adapters ...", flush=True)
    with running_server() as server:
        asyncio.run(warm_up(server.grpc_port, tokenizer))
        warm_up_steps = steps_after(server.http_port, -1)
        completions = asyncio.run(generate_all(server.grpc_port, tokenizer))
        steps = steps_after(server.http_port, warm_up_steps[-1]["step_id"])
    show(completions, steps)
    all_met = any(step["num_rows"] == len(completions) for step in steps)
    all_right = all(completion.is_right for completion in completions)
    print("all six completions are right" if all_right else "NOT all six completions are right")
    print("all six ran in one step" if all_met else "the six did NOT meet in one step")
    return 0 if all_right and all_met else 1


if __name__ == "__main__":
    sys.exit(main())
