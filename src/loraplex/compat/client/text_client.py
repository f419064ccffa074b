"""end_to_end_grpc_client.py: prompts to `ensemble` or `tensorrt_llm_bls`, their answers printed.

It always uses a stream, as the original does, so it works whether the model is decoupled or not.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loraplex.compat.client.array_files import read_lora_pair
from loraplex.compat.client.connection import grpc_client
from loraplex.compat.client.exchange import CACHE_AND_TIMES, Stream, requested_outputs
from loraplex.compat.client.flags import Say, check_at_least
from loraplex.compat.client.tensors import Array
from loraplex.compat.client.text_options import TextOptions
from loraplex.core.errors import ConfigError

_IF_SET = (
    ("repetition_penalty", "repetition_penalty", np.float32),
    ("presence_penalty", "presence_penalty", np.float32),
    ("frequency_penalty", "frequency_penalty", np.float32),
    ("num_return_sequences", "num_return_sequences", np.int32),
    ("end_id", "end_id", np.int32),
    ("pad_id", "pad_id", np.int32),
    ("lora_task_id", "lora_task_id", np.uint64),
)
"""(option, tensor, type) of those that are sent unless they are None."""

_ASKED = (
    ("return_log_probs", ("cum_log_probs", "output_log_probs")),
    ("return_context_logits", ("context_logits",)),
    ("return_generation_logits", ("generation_logits",)),
    ("return_perf_metrics", CACHE_AND_TIMES),
)
"""(option and tensor, the outputs that it brings)."""

Key = tuple[int, int]
"""(element of the batch, its sequence)."""


def run(options: TextOptions, say: Say) -> int:
    """0 unless a text is not the expected one. Raises ConfigError."""
    prompts = _text_list("--prompt", options.prompt)
    expected = _expected(options, len(prompts))
    check_at_least("--output-len", options.output_len, 0)
    batches = [prompts] if options.batch_inputs else [[prompt] for prompt in prompts]
    texts: list[str] = []
    with grpc_client(options) as client:
        for batch in batches:
            texts += _answers(options, client, batch, len(texts), say)
    wrong = [index for index, text in enumerate(expected) if not texts[index].startswith(text)]
    for index in wrong:
        say(f"{index}: expected {expected[index]!r}, got {texts[index]!r}")
    return 1 if wrong else 0


def _answers(
    options: TextOptions, client: Any, prompts: Sequence[str], first: int, say: Say
) -> list[str]:
    """The first text of each prompt; all of them are printed, numbered from `first` on."""
    outputs = ["text_output", *(n for o, names in _ASKED if getattr(options, o) for n in names)]
    if len(prompts) > 1:
        outputs.append("batch_index")
    if (options.num_return_sequences or 1) > 1:
        outputs.append("sequence_index")
    stream = Stream(
        client, options.model_name, options.request_id, outputs=requested_outputs(outputs)
    )
    tensors = _tensors(options, prompts)
    if options.verbose:
        for name, array in tensors.items():
            say(f"{name}: {array.dtype} {list(array.shape)}")
    stream.send(tensors)
    texts: dict[Key, list[str]] = defaultdict(list)
    details = []
    for result in stream.finish().results:
        _take(options, texts, result)
        details += [
            f"{name}: {array.tolist() if array.size < 64 else array.shape}"
            for name in outputs[1:]
            if not name.endswith("_index") and (array := result.as_numpy(name)) is not None
        ]
    if not texts:
        raise ConfigError("the server ended the request without an answer")
    for (element, _), beams in sorted(texts.items()):
        for text in beams:
            say(f"{first + element}: {text}")
    for line in details:
        say(line)
    return [texts[element, 0][0] for element in range(len(prompts))]


def _take(options: TextOptions, texts: dict[Key, list[str]], result: Any) -> None:
    """Add a response. An answer without batch_index may have all elements of the batch."""
    output = result.as_numpy("text_output")
    if output is None:
        return
    pieces = [bytes(text).decode(errors="replace") for text in output.ravel()]
    element, sequence = (_index(result, name) for name in ("batch_index", "sequence_index"))
    width = options.beam_width if element is None else len(pieces)
    for at in range(0, len(pieces), width):
        key = ((element or 0) + at // width, sequence or 0)
        old = texts[key] or [""] * width
        new = pieces[at : at + width]
        texts[key] = (
            new if options.overwrite_output_text else [a + b for a, b in zip(old, new, strict=True)]
        )


def _index(result: Any, name: str) -> int | None:
    array = result.as_numpy(name)
    return None if array is None else int(array.flat[0])


def _tensors(options: TextOptions, prompts: Sequence[str]) -> Mapping[str, Array]:
    num = len(prompts)

    def column(value: Any, dtype: Any) -> Array:
        return np.full((num, 1), value, dtype)

    given = dataclasses.asdict(options)
    tensors = {
        "text_input": _words([[prompt] for prompt in prompts]),
        "max_tokens": column(options.output_len, np.int32),
        "stream": column(options.streaming, np.bool_),
        "beam_width": column(options.beam_width, np.int32),
        "temperature": column(options.temperature, np.float32),
        "exclude_input_in_output": column(options.exclude_input_in_output, np.bool_),
    }
    for option, name, dtype in _IF_SET:
        if given[option] is not None:
            tensors[name] = column(given[option], dtype)
    tensors |= {name: column(True, np.bool_) for name, _ in _ASKED if given[name]}
    for name in ("stop_words", "bad_words", "embedding_bias_words"):
        if given[name]:
            tensors[name] = _words([given[name]] * num)
    for name in ("guided_decoding_guide_type", "guided_decoding_guide"):
        if given[name] is not None:
            tensors[name] = _words([[given[name]]] * num)
    return tensors | _bias_weights(options, num) | _adapter(options, num)


def _bias_weights(options: TextOptions, num: int) -> dict[str, Array]:
    words, weights = options.embedding_bias_words, options.embedding_bias_weights
    if len(words) != len(weights):
        raise ConfigError(
            f"--embedding-bias-words has {len(words)} words and --embedding-bias-weights "
            f"{len(weights)} weights; each word has one"
        )
    return {"embedding_bias_weights": np.array([weights] * num, np.float32)} if weights else {}


def _adapter(options: TextOptions, num: int) -> dict[str, Array]:
    if not options.lora_path:
        return {}
    if options.lora_task_id is None:
        raise ConfigError("Must specify `lora-task-id` with `lora-path` argument")
    weights, config = read_lora_pair(options.lora_path)
    return {"lora_weights": weights.repeat(num, 0), "lora_config": config.repeat(num, 0)}


def _words(rows: Sequence[Sequence[str]]) -> Array:
    """BYTES of the shape [rows, words]."""
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for at, words in enumerate(rows):
        array[at, :] = [word.encode() for word in words]
    return array


def _expected(options: TextOptions, num_prompts: int) -> list[str]:
    """Empty if nothing is to be checked."""
    if not options.check_outputs:
        return []
    if options.expected_outputs is None:
        raise ConfigError("--check-outputs needs --expected-outputs")
    expected = _text_list("--expected-outputs", options.expected_outputs)
    if len(expected) != num_prompts:
        raise ConfigError(f"--expected-outputs has {len(expected)} texts for {num_prompts} prompts")
    return expected


def _text_list(name: str, text: str) -> list[str]:
    """A JSON list of texts, or one text that is no such list. Raises ConfigError."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    if not isinstance(parsed, list):
        return [text]
    if not parsed or not all(isinstance(item, str) for item in parsed):
        raise ConfigError(f"{name} is a JSON list, and not one of texts: {text[:100]!r}")
    return parsed
