"""The tensors of a request to `tensorrt_llm`, from the program's flags."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from loraplex.compat.client.array_files import read_lora_pair, read_prompt_table, read_token_ids
from loraplex.compat.client.codec import Codec, Encoded
from loraplex.compat.client.flags import check_at_least, check_choice
from loraplex.compat.client.request_options import RequestOptions
from loraplex.compat.client.tensors import Array, row
from loraplex.compat.client.token_options import TokenOptions
from loraplex.core.errors import ConfigError

_DTYPES = ("float16", "float32", "bfloat16")
_NUM_LOOKAHEAD = 3

_IF_SET = (
    ("repetition_penalty", "repetition_penalty", np.float32),
    ("presence_penalty", "presence_penalty", np.float32),
    ("frequency_penalty", "frequency_penalty", np.float32),
    ("num_return_sequences", "num_return_sequences", np.int32),
    ("prompt_table_extra_id", "prompt_table_extra_ids", np.uint64),
    ("lora_task_id", "lora_task_id", np.uint64),
)
"""(option, tensor, type) of those that are sent unless they are None, or the program has no such
option."""

_IF_TRUE = (
    "exclude_input_in_output",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
)


def check_request(options: RequestOptions) -> None:
    """Raises ConfigError for a flag that no request can have."""
    check_choice("--dtype", options.dtype, _DTYPES)
    check_at_least("--request-output-len", options.request_output_len, 0)
    check_at_least("--beam-width", options.beam_width, 1)
    if options.draft_tokens_csv and not options.input_tokens_csv:
        raise ConfigError("--draft-tokens-csv needs --input-tokens-csv")


def check_options(options: TokenOptions) -> None:
    """Raises ConfigError for flags that contradict each other."""
    check_request(options)
    check_at_least("--stop-after-ms", options.stop_after_ms, 0)
    if options.num_return_sequences is not None and options.beam_width > 1:
        raise ConfigError("--num-return-sequences needs --beam-width 1")
    if options.lookahead_config and len(options.lookahead_config) != _NUM_LOOKAHEAD:
        raise ConfigError("--lookahead-config wants three numbers: window, n-gram, verification")
    if options.stop_via_request_cancel and not options.stop_after_ms:
        raise ConfigError("--stop-via-request-cancel needs --stop-after-ms, which says when")
    if options.requested_outputs and "output_ids" not in options.requested_outputs:
        raise ConfigError("--requested-outputs must have output_ids among them")


def prompt_of(options: RequestOptions, codec: Codec) -> Encoded:
    """Raises ConfigError."""
    if options.input_tokens_csv:
        token_ids = read_token_ids(options.input_tokens_csv)
        return Encoded(token_ids, options.end_id, options.pad_id)
    return codec.encode(options.text)


def request_tensors(
    options: RequestOptions, prompt: Encoded, *, is_streamed: bool = False
) -> Mapping[str, Array]:
    """By name. Raises ConfigError for a file that cannot be sent."""
    tensors = {
        "input_ids": row(prompt.token_ids, np.int32),
        "input_lengths": row([len(prompt.token_ids)], np.int32),
        "request_output_len": row([options.request_output_len], np.int32),
        "beam_width": row([options.beam_width], np.int32),
        "temperature": row([options.temperature], np.float32),
        "streaming": row([is_streamed], np.bool_),
        "end_id": row([prompt.end_id], np.int32),
        "pad_id": row([prompt.pad_id], np.int32),
        "runtime_top_k": row([options.top_k], np.int32),
        "runtime_top_p": row([options.top_p], np.float32),
    }
    given: dict[str, Any] = dataclasses.asdict(options)
    for option, name, dtype in _IF_SET:
        if given.get(option) is not None:
            tensors[name] = row([given[option]], dtype)
    tensors |= {name: row([True], np.bool_) for name in _IF_TRUE if given.get(name)}
    return tensors | _from_files(options)


def lookahead_tensors(options: TokenOptions) -> Mapping[str, Array]:
    """Of the window that guesses, if there is one."""
    names = ("window_size", "ngram_size", "verification_set_size")
    return {
        f"lookahead_{name}": row([value], np.int32)
        for name, value in itertools.zip_longest(names, options.lookahead_config)
        if value is not None
    }


def stop_tensors(prompt: Encoded) -> Mapping[str, Array]:
    """Of the request that stops another one with its id."""
    return {
        "input_ids": row(prompt.token_ids[:1], np.int32),
        "input_lengths": row([1], np.int32),
        "request_output_len": row([0], np.int32),
        "stop": row([True], np.bool_),
    }


def _from_files(options: RequestOptions) -> dict[str, Array]:
    tensors = {}
    if options.lora_path:
        tensors["lora_weights"], tensors["lora_config"] = read_lora_pair(options.lora_path)
    if options.draft_tokens_csv:
        tensors["draft_input_ids"] = row(read_token_ids(options.draft_tokens_csv), np.int32)
    if options.prompt_embedding_table_path:
        table = read_prompt_table(options.prompt_embedding_table_path, options.dtype)
        tensors["prompt_embedding_table"] = table
        tensors["prompt_vocab_size"] = row([table.shape[1]], np.int32)
    return tensors
