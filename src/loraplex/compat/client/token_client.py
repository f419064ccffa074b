"""inflight_batcher_llm_client.py: one prompt to `tensorrt_llm`, its answer printed.

Where its last version and the founding examples differ, the examples win: one line for a beam, and
the server's tokenizer where no folder is given. Unlike the original it asks the server whether the
model takes calls at all, and else sends an unstreamed request over a stream.
"""

from typing import Any

from loraplex.compat.client.codec import Codec, Encoded, codec_of
from loraplex.compat.client.connection import compression, grpc_client, is_decoupled
from loraplex.compat.client.exchange import (
    Calls,
    Exchange,
    Stream,
    own_request_id,
    requested_outputs,
    stop_after,
)
from loraplex.compat.client.flags import Say
from loraplex.compat.client.token_answer import TokenAnswer, read_answer
from loraplex.compat.client.token_check import check_output
from loraplex.compat.client.token_options import TokenOptions
from loraplex.compat.client.token_request import (
    check_options,
    lookahead_tensors,
    prompt_of,
    request_tensors,
    stop_tensors,
)
from loraplex.core.errors import ConfigError

LONG_PROMPT = 256
"""Of a longer prompt only the beginning is printed."""


def run(options: TokenOptions, say: Say) -> int:
    """0 if the answer came and is what was expected. Raises ConfigError."""
    check_options(options)
    with grpc_client(options) as client:
        codec = codec_of(options.tokenizer_dir, client)
        prompt = prompt_of(options, codec)
        _say_prompt(prompt, say)
        exchange = _exchange(options, client)
        tensors = request_tensors(options, prompt, is_streamed=options.streaming)
        exchange.send({**tensors, **lookahead_tensors(options)})
        if options.stop_after_ms:
            stop = None if options.stop_via_request_cancel else stop_tensors(prompt)
            stop_after(exchange, options.stop_after_ms, stop)
        replies = exchange.finish()
        for result in replies.results:
            if _is_empty(result):
                say("Got cancellation response from server")
        if replies.was_cancelled:
            say("Request is cancelled")
        answers = [result for result in replies.results if not _is_empty(result)]
        if not answers:
            if options.stop_after_ms:
                return 0
            raise ConfigError("the server ended the request without an answer")
        answer = read_answer(answers, prompt.token_ids, options)
        _check_stopped(options, answer)
        return _say_answer(options, answer, codec, say)


def _exchange(options: TokenOptions, client: Any) -> Exchange:
    request_id = options.request_id
    if options.stop_after_ms and not request_id:
        request_id = own_request_id()
    outputs = requested_outputs(options.requested_outputs)
    parameters = {"Streaming": options.streaming}
    of_call: dict[str, Any] = {"outputs": outputs, "parameters": parameters}
    if (
        options.streaming
        or options.num_return_sequences is not None
        or is_decoupled(client, options.model_name)
    ):
        return Stream(
            client,
            options.model_name,
            request_id,
            timeout=options.stream_timeout,
            compression=compression(options),
            **of_call,
        )
    of_call["compression_algorithm"] = compression(options)
    return Calls(client, options.model_name, request_id, **of_call)


def _is_empty(result: Any) -> bool:
    """What answers a stop request; a last piece of a stream has the tensor, if no tokens."""
    return result.as_numpy("output_ids") is None


def _check_stopped(options: TokenOptions, answer: TokenAnswer) -> None:
    """Raises ConfigError if a stopped request came to its end all the same."""
    longest = max(len(sequence.new_token_ids) for sequence in answer.sequences)
    if options.stop_after_ms and longest >= options.request_output_len:
        raise ConfigError(
            f"the request was to stop after {options.stop_after_ms} ms, and all "
            f"{options.request_output_len} tokens came: ask for more, or stop earlier"
        )


def _say_prompt(prompt: Encoded, say: Say) -> None:
    say("=========")
    say(f"Using pad_id:  {prompt.pad_id}")
    say(f"Using end_id:  {prompt.end_id}")
    token_ids = prompt.token_ids
    if len(token_ids) > LONG_PROMPT:
        say(f"Input sequence starts with:  {token_ids[:LONG_PROMPT]}")
    else:
        say(f"Input sequence:  {token_ids}")


def _say_answer(options: TokenOptions, answer: TokenAnswer, codec: Codec, say: Say) -> int:
    say("Got completed request")
    if options.verbose:
        lengths = [len(sequence.token_ids) for sequence in answer.sequences]
        say(f"sequence_length:  {lengths}")
    if not options.input_tokens_csv:
        say(f"Input: {options.text}")
    for sequence in answer.sequences:
        if not options.input_tokens_csv:
            say(f"Output beam {sequence.beam}: {codec.decode(sequence.new_token_ids)}")
        say(f"Output sequence:  {sequence.token_ids}")
    passed = True
    if options.check_output:
        passed = check_output(options, answer, say)
    for line in answer.details:
        say(line)
    return 0 if passed else 1
