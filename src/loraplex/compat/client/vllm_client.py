"""client_lora.py and client.py of the vLLM backend: prompts of a file, all at once over a stream.

Unlike the original, `-s` without `--exclude-inputs-in-outputs` streams: the backend refuses to put
prompts into streamed outputs, and the original requested exactly that.
"""

import json
from pathlib import Path

import numpy as np

from loraplex.compat.client.request_parts import Say, decoded, requested_outputs
from loraplex.compat.client.wire import open_grpc_wire
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
SEPARATOR = "\n\n=========\n\n"


def run(options: Flags, say: Say) -> int:
    """Return 0 if every request has a response. Raises ConfigError."""
    check_at_least("--iterations", options.iterations, 1)
    say(f"Loading inputs from `{options.input_prompts}`...")
    prompts = _read_prompts(options.input_prompts)
    outputs, errors = _generate(options, prompts)
    say(f"Storing results into `{options.results_file}`...")
    content = "".join(f"{''.join(pieces)}{SEPARATOR}" for pieces in outputs.values())
    try:
        Path(options.results_file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--results-file: {error}") from error
    if options.verbose:
        say("\nContents of `" + options.results_file + "` ===>")
        say(content)
    for reason in errors:
        say(f"Encountered error while processing: {reason}")
    passed = not errors and all(outputs.values())
    say("PASS: vLLM example" if passed else "FAIL: vLLM example")
    return 0 if passed else 1


def _read_prompts(path: str) -> list[str]:
    """Return the lines of a file, each with its line break. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--input-prompts: {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--input-prompts: {path} is empty")
    return lines


def _generate(options: Flags, prompts: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the pieces of the outputs by request id, and the errors."""
    parameters = dict(SAMPLING)
    if options.lora_name is not None:
        parameters["lora_name"] = options.lora_name
    excludes = options.exclude_inputs_in_outputs or options.streaming_mode
    outputs: dict[str, list[str]] = {}
    timeout = options.stream_timeout
    with open_grpc_wire(options.url, options, is_streamed=True, timeout=timeout) as wire:
        for index, prompt in enumerate(prompts * options.iterations, start=options.offset):
            outputs[str(index)] = []
            # One-dimensional: models of this backend have no batch dimension.
            tensors = {
                "text_input": np.array([prompt.encode()], dtype=object),
                "stream": np.array([options.streaming_mode]),
                "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=object),
                "exclude_input_in_output": np.array([excludes]),
            }
            details = {"outputs": requested_outputs(["text_output"]), "parameters": parameters}
            wire.send(options.model, tensors, str(index), **details)
        for response in wire.finish():
            if (output := response.outputs.get("text_output")) is not None:
                outputs[response.request_id] += decoded(output)
        return outputs, [error.message() for error in wire.errors]
