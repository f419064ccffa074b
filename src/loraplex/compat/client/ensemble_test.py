"""end_to_end_test.py: the models one by one and the ensemble say the same; then, how fast.

The functionality test runs preprocessing, tensorrt_llm and postprocessing by hand and compares
text, log probabilities and logits with what the ensemble (and tensorrt_llm_bls) answers.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from loraplex.compat.client.dataset import Sample, read_dataset
from loraplex.compat.client.ensemble_test_options import EnsembleTestOptions
from loraplex.compat.client.flags import Say
from loraplex.compat.client.tensors import Array, row, texts
from loraplex.compat.client.wire import Pending, Wire, open_wire
from loraplex.core.errors import ConfigError

BLS = "tensorrt_llm_bls"
NUM_WARM_UP = 10
TOLERANCE = 1e-2
"""Of logits and log probabilities: batches differ."""

_ASKED = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_context_logits": ("context_logits",),
    "return_generation_logits": ("generation_logits",),
}
"""By option and tensor, the outputs that it brings."""

_FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}


def run(options: EnsembleTestOptions, say: Say) -> int:
    """1 if the functionality test fails. Raises ConfigError."""
    if options.test_llmapi:
        raise ConfigError("--test-llmapi: the llmapi model is not served; test the ensemble")
    samples = read_dataset(options.dataset, options.max_input_len, say)
    with open_wire(
        options.protocol, options.url, options.concurrency, is_streamed=_is_streamed(options)
    ) as wire:
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
        total, of_requests = _measure(options, wire, model, samples)
        say(f"[INFO] Total Latency: {round(total * 1000, 3)} ms")
        if options.protocol == "grpc":
            say(f"[INFO] Total request latencies: {of_requests * 1000} ms")
    return 0


def _is_streamed(options: EnsembleTestOptions) -> bool:
    if options.streaming and options.protocol != "grpc":
        raise ConfigError("--streaming needs -i grpc")
    return options.streaming


# ---------------------------------------------------------------- functionality


def _test_functionality(
    options: EnsembleTestOptions, wire: Wire, samples: Sequence[Sample], say: Say
) -> str:
    """What differs first; empty: nothing."""
    models = [options.model_name, *([BLS] if options.test_bls else [])]
    for sample in samples:
        split = _split(options, wire, sample)
        for model in models:
            whole = wire.submit(model, _text_tensors(options, sample)).result().outputs
            difference = _difference(options, split, whole)
            if difference:
                return f"{model} on the prompt {sample.prompt!r}: {difference}"
        if options.verbose:
            say(f"Response: {_text(split['text_output'])}")
    return ""


def _split(options: EnsembleTestOptions, wire: Wire, sample: Sample) -> Mapping[str, Array]:
    """The outputs of the three models, the text under the ensemble's name."""
    no_words = texts([""])
    prepared = wire.submit(
        "preprocessing",
        {
            "QUERY": texts([sample.prompt]),
            "BAD_WORDS_DICT": no_words,
            "STOP_WORDS_DICT": no_words,
            "REQUEST_OUTPUT_LEN": row([sample.num_output_tokens], np.int32),
        },
    ).result()
    tensors = {ours: prepared.outputs[name] for name, ours in _FROM_PREPROCESSING.items()}
    tensors |= _asked_tensors(options)
    generated = wire.submit("tensorrt_llm", tensors).result().outputs
    told = wire.submit(
        "postprocessing",
        {
            "TOKENS_BATCH": generated["output_ids"],
            "SEQUENCE_LENGTH": generated["sequence_length"],
        },
    ).result()
    return {**generated, "text_output": told.outputs["OUTPUT"]}


def _difference(
    options: EnsembleTestOptions, split: Mapping[str, Array], whole: Mapping[str, Array]
) -> str:
    """What the ensemble answers otherwise; empty: nothing."""
    by_hand, text = _text(split["text_output"]), _text(whole["text_output"])
    if by_hand != text:
        return f"the text is {text!r}, and by hand {by_hand!r}"
    for name in _asked_outputs(options):
        if name not in whole or name not in split:
            return f"there is no {name}"
        if whole[name].shape != split[name].shape:
            return f"{name} is {whole[name].shape}, and by hand {split[name].shape}"
        if not np.allclose(whole[name], split[name], rtol=TOLERANCE, atol=TOLERANCE):
            return f"{name} differs by more than {TOLERANCE}"
    return ""


def _text(output: Array) -> str:
    return bytes(output.flat[0]).decode(errors="replace")


# ---------------------------------------------------------------- tensors


def _text_tensors(
    options: EnsembleTestOptions, sample: Sample, *, is_streamed: bool = False
) -> dict[str, Array]:
    tensors = {
        "text_input": texts([sample.prompt]),
        "max_tokens": row([sample.num_output_tokens], np.int32),
        "bad_words": texts([""]),
        "stop_words": texts([""]),
    }
    if is_streamed:
        tensors["stream"] = row([True], np.bool_)
    return tensors | _asked_tensors(options)


def _asked_tensors(options: EnsembleTestOptions) -> dict[str, Array]:
    return {name: row([True], np.bool_) for name in _ASKED if getattr(options, name)}


def _asked_outputs(options: EnsembleTestOptions) -> list[str]:
    return [name for option, names in _ASKED.items() if getattr(options, option) for name in names]


# ---------------------------------------------------------------- speed


def _measure(
    options: EnsembleTestOptions, wire: Wire, model: str, samples: Sequence[Sample]
) -> tuple[float, float]:
    """(seconds of all together, seconds of every request added up)."""
    begin = time.perf_counter()
    pending: list[tuple[float, Pending]] = []
    for sample in samples:
        tensors = _text_tensors(options, sample, is_streamed=options.streaming)
        pending.append((time.perf_counter(), wire.submit(model, tensors)))
    of_requests = sum(answer.result().end - start for start, answer in pending)
    return time.perf_counter() - begin, of_requests
