"""end_to_end_grpc_client.py: send prompts to `ensemble` or `tensorrt_llm_bls`, print the outputs.

It always uses a stream, as the original does, so it works whether the model is decoupled or not.
"""

import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from loraplex.compat.client.request_parts import (
    Array,
    Say,
    decoded,
    flag_tensors,
    read_lora_pair,
    requested_names,
    requested_outputs,
    texts,
)
from loraplex.compat.client.wire import GrpcWire, Tensors, open_grpc_wire
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
    with open_grpc_wire(options.url, options, is_streamed=True) as wire:
        for batch in batches:
            outputs += _generate(options, wire, batch, len(outputs), say)
    wrong = [index for index, text in enumerate(expected) if not outputs[index].startswith(text)]
    for index in wrong:
        say(f"{index}: expected {expected[index]!r}, got {outputs[index]!r}")
    return 1 if wrong else 0


def _generate(
    options: Flags, wire: GrpcWire, prompts: Sequence[str], first: int, say: Say
) -> list[str]:
    """Return the first text of each prompt; print all of them, numbered from `first` on."""
    names = ["text_output", *requested_names(options)]
    indices = ["batch_index"] if len(prompts) > 1 else []
    indices += ["sequence_index"] if (options.num_return_sequences or 1) > 1 else []
    tensors = _tensors(options, prompts)
    if options.verbose:
        for name, array in tensors.items():
            say(f"{name}: {array.dtype} {list(array.shape)}")
    outputs = requested_outputs([*names, *indices])
    wire.send(options.model_name, tensors, options.request_id, outputs=outputs)
    results = wire.outputs()
    by_sequence: dict[tuple[int, int], list[str]] = defaultdict(list)
    for result in results:
        _add_result(options, by_sequence, result)
    if not by_sequence:
        raise ConfigError("the server ended the request without a response")
    for (element, _), beams in sorted(by_sequence.items()):
        for text in beams:
            say(f"{first + element}: {text}")
    for result in results:
        for name in names[1:]:
            if (found := result.get(name)) is not None:
                is_small = found.size < _MAX_PRINTED_ELEMENTS
                say(f"{name}: {found.tolist() if is_small else found.shape}")
    return [by_sequence[element, 0][0] for element in range(len(prompts))]


def _add_result(
    options: Flags, by_sequence: dict[tuple[int, int], list[str]], result: Tensors
) -> None:
    """Add a response to the beams of each (element of the batch, sequence of it).

    A response without batch_index may have all elements of the batch.
    """
    if "text_output" not in result:
        return
    pieces = decoded(result["text_output"])
    element, sequence = (
        int(result[name].flat[0]) if name in result else 0
        for name in ("batch_index", "sequence_index")
    )
    width = len(pieces) if "batch_index" in result else options.beam_width
    for at in range(0, len(pieces), width):
        key = (element + at // width, sequence)
        old = by_sequence[key] or [""] * width
        new = pieces[at : at + width]
        if not options.overwrite_output_text:
            new = [a + b for a, b in zip(old, new, strict=True)]
        by_sequence[key] = new


def _tensors(options: Flags, prompts: Sequence[str]) -> dict[str, Array]:
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
