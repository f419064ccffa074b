"""client_lora.py and client.py of the vLLM backend: prompts of a file, all at once over a stream.

Unlike the original, `-s` without `--exclude-inputs-in-outputs` streams: the backend refuses to put
prompts into streamed answers, and the original asked for just that.
"""

import json
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.connection import grpc_client
from loraplex.compat.client.flags import Say, check_at_least
from loraplex.compat.client.tensors import inputs
from loraplex.compat.client.vllm_options import VllmOptions
from loraplex.core.errors import ConfigError

SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
SEPARATOR = "\n\n=========\n\n"


def run(options: VllmOptions, say: Say) -> int:
    """0 if every request was answered. Raises ConfigError."""
    check_at_least("--iterations", options.iterations, 1)
    say(f"Loading inputs from `{options.input_prompts}`...")
    prompts = _read_prompts(options.input_prompts)
    with grpc_client(options) as client:
        answers, errors = _ask(options, client, prompts)
    say(f"Storing results into `{options.results_file}`...")
    content = "".join(f"{''.join(pieces)}{SEPARATOR}" for pieces in answers.values())
    try:
        Path(options.results_file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--results-file: {error}") from error
    if options.verbose:
        say("\nContents of `" + options.results_file + "` ===>")
        say(content)
    for reason in errors:
        say(f"Encountered error while processing: {reason}")
    passed = not errors and all(answers.values())
    say("PASS: vLLM example" if passed else "FAIL: vLLM example")
    return 0 if passed else 1


def _read_prompts(path: str) -> list[str]:
    """The lines of a file, each with its line break. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--input-prompts: {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--input-prompts: {path} is empty")
    return lines


def _ask(
    options: VllmOptions, client: Any, prompts: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """(the pieces of each answer by request id, errors)."""
    received: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
    client.start_stream(
        callback=lambda result, error: received.put((result, error)),
        stream_timeout=options.stream_timeout,
    )
    parameters = dict(SAMPLING)
    if options.lora_name is not None:
        parameters["lora_name"] = options.lora_name
    answers: dict[str, list[str]] = {}
    for iteration in range(options.iterations):
        for index, prompt in enumerate(prompts):
            request_id = str(options.offset + iteration * len(prompts) + index)
            answers[request_id] = []
            client.async_stream_infer(
                options.model,
                _inputs(options, prompt, parameters),
                outputs=[triton_grpc.InferRequestedOutput("text_output")],
                request_id=request_id,
                parameters=parameters,
            )
    client.stop_stream()
    errors = []
    while not received.empty():
        result, error = received.get()
        if error is not None:
            errors.append(error.message())
        else:
            output = result.as_numpy("text_output")
            if output is not None:
                text = b"".join(output.ravel().tolist()).decode(errors="replace")
                answers[result.get_response().id].append(text)
    return answers, errors


def _inputs(options: VllmOptions, prompt: str, parameters: dict[str, str]) -> list[Any]:
    """One-dimensional: models of this backend have no batch dimension."""
    excludes = options.exclude_inputs_in_outputs or options.streaming_mode
    return inputs(
        triton_grpc,
        {
            "text_input": np.array([prompt.encode()], dtype=object),
            "stream": np.array([options.streaming_mode]),
            "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=object),
            "exclude_input_in_output": np.array([excludes]),
        },
    )
