"""end_to_end_test.py: compare the ensemble with its models one by one, then measure it.

The functionality test runs preprocessing, tensorrt_llm and postprocessing by hand and compares
text, log probabilities and logits with those of the ensemble (and of tensorrt_llm_bls).
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from loraplex.compat.client.request_parts import (
    Array,
    Sample,
    Say,
    flag_tensors,
    prepared_tensors,
    read_dataset,
    requested_names,
    row,
    text_of,
    texts,
)
from loraplex.compat.client.wire import Pending, Wire, open_wire
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError

BLS = "tensorrt_llm_bls"
NUM_WARM_UP = 10
TOLERANCE = 1e-2
"""Allowed difference of logits and log probabilities, as batches differ."""


def run(options: Flags, say: Say) -> int:
    """Return 1 if the functionality test fails. Raises ConfigError."""
    if options.streaming and options.protocol != "grpc":
        raise ConfigError("--streaming needs -i grpc")
    samples = read_dataset(options.dataset, options.max_input_len, say)
    with open_wire(options, options.concurrency, is_streamed=options.streaming) as wire:
        say(f"[INFO] Start testing on {len(samples)} prompts.")
        difference = _test_functionality(options, wire, samples, say)
        if difference:
            say(f"[ERROR] Functionality test failed: {difference}")
            return 1
        say("[INFO] Functionality test succeed.")
        model = BLS if options.test_bls else options.model_name
        say("[INFO] Warm up for benchmarking.")
        _measure(options, wire, model, samples[:NUM_WARM_UP])
        say(f"[INFO] Start benchmarking on {len(samples)} prompts.")
        total, per_request = _measure(options, wire, model, samples)
        say(f"[INFO] Total Latency: {round(total * 1000, 3)} ms")
        if options.protocol == "grpc":
            say(f"[INFO] Total request latencies: {per_request * 1000} ms")
    return 0


def _test_functionality(options: Flags, wire: Wire, samples: Sequence[Sample], say: Say) -> str:
    """Return the first difference; empty: none."""
    models = [options.model_name, *([BLS] if options.test_bls else [])]
    for sample in samples:
        split = _split(options, wire, sample)
        for model in models:
            whole = wire.submit(model, _text_tensors(options, sample)).result().outputs
            difference = _difference(options, split, whole)
            if difference:
                return f"{model} on the prompt {sample.prompt!r}: {difference}"
        if options.verbose:
            say(f"Response: {text_of(split['text_output'])}")
    return ""


def _split(options: Flags, wire: Wire, sample: Sample) -> Mapping[str, Array]:
    """Return the outputs of the three models, the text under the ensemble's name."""
    query = {
        "QUERY": texts([[sample.prompt]]),
        "BAD_WORDS_DICT": texts([[""]]),
        "STOP_WORDS_DICT": texts([[""]]),
        "REQUEST_OUTPUT_LEN": row([sample.num_output_tokens]),
    }
    prepared = wire.submit("preprocessing", query).result().outputs
    tensors = prepared_tensors(prepared)
    generated = wire.submit("tensorrt_llm", tensors | flag_tensors(options)).result().outputs
    tokens = {
        "TOKENS_BATCH": generated["output_ids"],
        "SEQUENCE_LENGTH": generated["sequence_length"],
    }
    decoded = wire.submit("postprocessing", tokens).result().outputs
    return {**generated, "text_output": decoded["OUTPUT"]}


def _difference(options: Flags, split: Mapping[str, Array], whole: Mapping[str, Array]) -> str:
    """Return how the ensemble's outputs differ; empty: not at all."""
    by_hand, text = text_of(split["text_output"]), text_of(whole["text_output"])
    if by_hand != text:
        return f"the text is {text!r}, and by hand {by_hand!r}"
    for name in requested_names(options):
        if name not in whole or name not in split:
            return f"there is no {name}"
        if whole[name].shape != split[name].shape:
            return f"{name} is {whole[name].shape}, and by hand {split[name].shape}"
        if not np.allclose(whole[name], split[name], rtol=TOLERANCE, atol=TOLERANCE):
            return f"{name} differs by more than {TOLERANCE}"
    return ""


def _text_tensors(options: Flags, sample: Sample, *, is_streamed: bool = False) -> dict[str, Array]:
    tensors = {
        "text_input": texts([[sample.prompt]]),
        "max_tokens": row([sample.num_output_tokens]),
        "bad_words": texts([[""]]),
        "stop_words": texts([[""]]),
    }
    if is_streamed:
        tensors["stream"] = row([True], np.bool_)
    return tensors | flag_tensors(options)


def _measure(
    options: Flags, wire: Wire, model: str, samples: Sequence[Sample]
) -> tuple[float, float]:
    """Return the seconds of all requests together, and the sum of each request's seconds."""
    begin = time.perf_counter()
    pending: list[tuple[float, Pending]] = []
    for sample in samples:
        tensors = _text_tensors(options, sample, is_streamed=options.streaming)
        pending.append((time.perf_counter(), wire.submit(model, tensors)))
    per_request = sum(response.result().end - start for start, response in pending)
    return time.perf_counter() - begin, per_request
