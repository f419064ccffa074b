"""end_to_end_grpc_client.py: send prompts to `ensemble` or `tensorrt_llm_bls`, print the outputs.

It always uses a stream, as the original does, so it works whether the model is decoupled or not.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loraplex.compat.client.connection import grpc_client
from loraplex.compat.client.exchange import Stream, requested_names, requested_outputs
from loraplex.compat.client.files import Say, read_lora_pair
from loraplex.compat.client.tensors import Array, flag_tensors, texts
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

_MAX_PRINTED_ELEMENTS = 64


def run(options: Flags, say: Say) -> int:
    """Return 0 unless a text is not the expected one. Raises ConfigError."""
    prompts = _text_list("--prompt", options.prompt)
    expected = _expected(options, len(prompts))
    check_at_least("--output-len", options.output_len, 0)
    batches = [prompts] if options.batch_inputs else [[prompt] for prompt in prompts]
    outputs: list[str] = []
    with grpc_client(options.url, options) as client:
        for batch in batches:
            outputs += _generate(options, client, batch, len(outputs), say)
    wrong = [index for index, text in enumerate(expected) if not outputs[index].startswith(text)]
    for index in wrong:
        say(f"{index}: expected {expected[index]!r}, got {outputs[index]!r}")
    return 1 if wrong else 0


def _generate(
    options: Flags, client: Any, prompts: Sequence[str], first: int, say: Say
) -> list[str]:
    """Return the first text of each prompt; print all of them, numbered from `first` on."""
    outputs = ["text_output", *requested_names(options)]
    if len(prompts) > 1:
        outputs.append("batch_index")
    if (options.num_return_sequences or 1) > 1:
        outputs.append("sequence_index")
    stream = Stream(client, options.model_name)
    tensors = _tensors(options, prompts)
    if options.verbose:
        for name, array in tensors.items():
            say(f"{name}: {array.dtype} {list(array.shape)}")
    stream.send(tensors, options.request_id, outputs=requested_outputs(outputs))
    by_sequence: dict[tuple[int, int], list[str]] = defaultdict(list)
    details = []
    for result in stream.finish():
        _add_result(options, by_sequence, result)
        details += [
            f"{name}: {array.tolist() if array.size < _MAX_PRINTED_ELEMENTS else array.shape}"
            for name in outputs[1:]
            if not name.endswith("_index") and (array := result.as_numpy(name)) is not None
        ]
    if not by_sequence:
        raise ConfigError("the server ended the request without a response")
    for (element, _), beams in sorted(by_sequence.items()):
        for text in beams:
            say(f"{first + element}: {text}")
    for line in details:
        say(line)
    return [by_sequence[element, 0][0] for element in range(len(prompts))]


def _add_result(options: Flags, by_sequence: dict[tuple[int, int], list[str]], result: Any) -> None:
    """Add a response to the beams of each (element of the batch, sequence of it).

    A response without batch_index may have all elements of the batch.
    """
    output = result.as_numpy("text_output")
    if output is None:
        return
    pieces = [bytes(text).decode(errors="replace") for text in output.ravel()]
    element, sequence = (_index(result, name) for name in ("batch_index", "sequence_index"))
    width = options.beam_width if element is None else len(pieces)
    for at in range(0, len(pieces), width):
        key = ((element or 0) + at // width, sequence or 0)
        old = by_sequence[key] or [""] * width
        new = pieces[at : at + width]
        if not options.overwrite_output_text:
            new = [a + b for a, b in zip(old, new, strict=True)]
        by_sequence[key] = new


def _index(result: Any, name: str) -> int | None:
    array = result.as_numpy(name)
    return None if array is None else int(array.flat[0])


def _tensors(options: Flags, prompts: Sequence[str]) -> Mapping[str, Array]:
    num_prompts = len(prompts)
    words, weights = options.embedding_bias_words, options.embedding_bias_weights
    if len(words) != len(weights):
        raise ConfigError(
            f"--embedding-bias-words has {len(words)} words and --embedding-bias-weights "
            f"{len(weights)} weights; each word has one"
        )
    adapter = {}
    if options.lora_path:
        if options.lora_task_id is None:
            raise ConfigError("Must specify `lora-task-id` with `lora-path` argument")
        pair = read_lora_pair(options.lora_path)
        adapter = {name: array.repeat(num_prompts, 0) for name, array in pair.items()}
    off = np.zeros((num_prompts, 1), np.bool_)
    return {
        "text_input": texts([[prompt] for prompt in prompts]),
        "stream": off,
        "exclude_input_in_output": off,
        **flag_tensors(options, num_prompts),
        **adapter,
    }


def _expected(options: Flags, num_prompts: int) -> list[str]:
    """Return the expected texts, which are none without --check-outputs."""
    if not options.check_outputs:
        return []
    if options.expected_outputs is None:
        raise ConfigError("--check-outputs needs --expected-outputs")
    expected = _text_list("--expected-outputs", options.expected_outputs)
    if len(expected) != num_prompts:
        raise ConfigError(f"--expected-outputs has {len(expected)} texts for {num_prompts} prompts")
    return expected


def _text_list(name: str, text: str) -> list[str]:
    """Read a JSON list of texts, or one text that is no such list. Raises ConfigError."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    if not isinstance(parsed, list):
        return [text]
    if not parsed or not all(isinstance(item, str) for item in parsed):
        raise ConfigError(f"{name} is a JSON list, and not one of texts: {text[:100]!r}")
    return parsed
