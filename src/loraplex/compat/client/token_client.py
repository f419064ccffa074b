"""inflight_batcher_llm_client.py: send one prompt to `tensorrt_llm`, print the output.

Where its last version and the founding examples differ, the examples win: one line for a beam, and
the server's tokenizer if no folder is given. Unlike the original it finds out whether the model
takes calls at all, and otherwise sends an unstreamed request over a stream.
"""

import time
import uuid
from typing import Any

import numpy as np

from loraplex.compat.client.codec import Codec, Encoded, FolderCodec, ServedCodec
from loraplex.compat.client.connection import grpc_client, is_decoupled
from loraplex.compat.client.exchange import Calls, Exchange, Stream, requested_outputs
from loraplex.compat.client.files import Say
from loraplex.compat.client.tensors import row
from loraplex.compat.client.token_output import (
    TokenSequence,
    check_output,
    detail_lines,
    read_sequences,
)
from loraplex.compat.client.token_request import check_request, prompt_of, request_tensors
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

MAX_PRINTED_TOKENS = 256
_LOOKAHEAD = ("window_size", "ngram_size", "verification_set_size")


def run(options: Flags, say: Say) -> int:
    """Return 0 if the output came and is the expected one. Raises ConfigError."""
    _check(options)
    with grpc_client(options.url, options) as client:
        folder = options.tokenizer_dir
        codec: Codec = FolderCodec(folder) if folder else ServedCodec(client)
        prompt = prompt_of(options, codec)
        _print_prompt(prompt, say)
        exchange = _send(options, client, prompt)
        results = exchange.finish()
        # The response to a stop request has no output_ids; a stream's last piece has, if empty.
        outputs = [result for result in results if result.as_numpy("output_ids") is not None]
        for _ in range(len(results) - len(outputs)):
            say("Got cancellation response from server")
        if exchange.was_cancelled:
            say("Request is cancelled")
        if not outputs:
            if options.stop_after_ms:
                return 0
            raise ConfigError("the server ended the request without a response")
        sequences = read_sequences(outputs, prompt.token_ids, options)
        _check_stopped(options, sequences)
        _print_output(options, sequences, codec, say)
        passed = not options.check_output or check_output(options, sequences[0], say)
        for line in detail_lines(outputs):
            say(line)
        return 0 if passed else 1


def _check(options: Flags) -> None:
    """Raise ConfigError for flags that contradict each other."""
    check_request(options)
    check_at_least("--stop-after-ms", options.stop_after_ms, 0)
    if options.num_return_sequences is not None and options.beam_width > 1:
        raise ConfigError("--num-return-sequences needs --beam-width 1")
    if options.lookahead_config and len(options.lookahead_config) != len(_LOOKAHEAD):
        raise ConfigError("--lookahead-config wants three numbers: window, n-gram, verification")
    if options.stop_via_request_cancel and not options.stop_after_ms:
        raise ConfigError("--stop-via-request-cancel needs --stop-after-ms, which sets the time")
    if options.requested_outputs and "output_ids" not in options.requested_outputs:
        raise ConfigError("--requested-outputs must have output_ids among them")


def _send(options: Flags, client: Any, prompt: Encoded) -> Exchange:
    """Send the request and, after --stop-after-ms, what stops it."""
    name = options.grpc_compression_algorithm
    compression = None if name == "none" else name
    is_stream = options.streaming or options.num_return_sequences is not None
    exchange: Exchange
    if is_stream or is_decoupled(client, options.model_name):
        exchange = Stream(
            client, options.model_name, timeout=options.stream_timeout, compression=compression
        )
    else:
        exchange = Calls(client, options.model_name, compression=compression)
    tensors = dict(request_tensors(options, prompt))
    for tensor, value in zip(_LOOKAHEAD, options.lookahead_config, strict=False):
        tensors[f"lookahead_{tensor}"] = row([value])
    request_id = options.request_id
    if options.stop_after_ms and not request_id:
        # A stop request names the request that it stops; old servers want a number.
        request_id = str(uuid.uuid4().int >> 65)
    details = {
        "outputs": requested_outputs(options.requested_outputs),
        "parameters": {"Streaming": options.streaming},
    }
    exchange.send(tensors, request_id, **details)
    if options.stop_after_ms:
        time.sleep(options.stop_after_ms / 1000)
        if options.stop_via_request_cancel:
            exchange.cancel()
        else:
            stop = {
                "input_ids": row(prompt.token_ids[:1]),
                "input_lengths": row([1]),
                "request_output_len": row([0]),
                "stop": row([True], np.bool_),
            }
            exchange.send(stop, request_id, **details)
    return exchange


def _check_stopped(options: Flags, sequences: list[TokenSequence]) -> None:
    """Raise ConfigError if a stopped request came to its end all the same."""
    longest = max(len(sequence.new_token_ids) for sequence in sequences)
    if options.stop_after_ms and longest >= options.request_output_len:
        raise ConfigError(
            f"the request was to stop after {options.stop_after_ms} ms, and all "
            f"{options.request_output_len} tokens came: request more tokens, or stop earlier"
        )


def _print_prompt(prompt: Encoded, say: Say) -> None:
    say("=========")
    say(f"Using pad_id:  {prompt.pad_id}")
    say(f"Using end_id:  {prompt.end_id}")
    token_ids = prompt.token_ids
    if len(token_ids) > MAX_PRINTED_TOKENS:
        say(f"Input sequence starts with:  {token_ids[:MAX_PRINTED_TOKENS]}")
    else:
        say(f"Input sequence:  {token_ids}")


def _print_output(options: Flags, sequences: list[TokenSequence], codec: Codec, say: Say) -> None:
    say("Got completed request")
    if options.verbose:
        say(f"sequence_length:  {[len(sequence.token_ids) for sequence in sequences]}")
    has_text = not options.input_tokens_csv
    if has_text:
        say(f"Input: {options.text}")
    for sequence in sequences:
        if has_text:
            say(f"Output beam {sequence.beam}: {codec.decode(sequence.new_token_ids)}")
        say(f"Output sequence:  {sequence.token_ids}")
