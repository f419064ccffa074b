"""inflight_batcher_llm_client.py: send one prompt to `tensorrt_llm`, print the output.

Where its last version and the founding examples differ, the examples win: one line for a beam, and
the server's tokenizer if no folder is given. Unlike the original it finds out whether the model
takes calls at all, and otherwise sends an unstreamed request over a stream.
"""

import dataclasses
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from loraplex.compat.client.request_parts import (
    CACHE_AND_TIMES,
    Codec,
    Encoded,
    FolderCodec,
    Say,
    ServedCodec,
    check_request,
    prompt_of,
    read_token_ids,
    request_tensors,
    requested_outputs,
    row,
)
from loraplex.compat.client.wire import GrpcWire, Tensors, open_grpc_wire
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

MAX_PRINTED_TOKENS = 256
GPT2_OUTPUT = (
    *(21221, 878, 3867, 284, 3576, 287, 262, 1903),
    *(6303, 82, 13, 679, 468, 1201, 3111, 287),
)
"""GPT-2's greedy output for the default prompt."""
_LOOKAHEAD = ("window_size", "ngram_size", "verification_set_size")
_SHAPES = ("context_logits", "generation_logits")
_MEASURED = (
    *CACHE_AND_TIMES,
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
    *("num_input_tokens", "num_output_tokens"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSequence:
    """A beam of the output, or one of several outputs, which are then all beam 0."""

    beam: int
    token_ids: list[int]
    """All tokens: with the prompt, unless the request excluded it."""
    new_token_ids: list[int]


def run(options: Flags, say: Say) -> int:
    """Return 0 if the output came and is the expected one. Raises ConfigError."""
    _check(options)
    name = options.grpc_compression_algorithm
    with open_grpc_wire(
        options.url,
        options,
        is_streamed=options.streaming or options.num_return_sequences is not None,
        timeout=options.stream_timeout,
        compression=None if name == "none" else name,
    ) as wire:
        folder = options.tokenizer_dir
        codec: Codec = FolderCodec(folder) if folder else ServedCodec(wire.client)
        prompt = prompt_of(options, codec)
        _print_prompt(prompt, say)
        _send(options, wire, prompt)
        results = wire.outputs()
        # The response to a stop request has no output_ids; a stream's last piece has, if empty.
        outputs = [result for result in results if "output_ids" in result]
        for _ in range(len(results) - len(outputs)):
            say("Got cancellation response from server")
        if wire.was_cancelled:
            say("Request is cancelled")
        if not outputs:
            if options.stop_after_ms:
                return 0
            raise ConfigError("the server ended the request without a response")
        sequences = _sequences(options, outputs, prompt.token_ids)
        _check_stopped(options, sequences)
        _print_output(options, sequences, codec, say)
        passed = not options.check_output or _check_output(options, sequences[0], say)
        for line in _detail_lines(outputs):
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


def _send(options: Flags, wire: GrpcWire, prompt: Encoded) -> None:
    """Send the request and, after --stop-after-ms, what stops it."""
    tensors = request_tensors(options, prompt)
    for tensor, value in zip(_LOOKAHEAD, options.lookahead_config, strict=False):
        tensors[f"lookahead_{tensor}"] = row([value])
    # A stop request names the request that it stops; old servers want a number.
    own_id = str(uuid.uuid4().int >> 65) if options.stop_after_ms else ""
    request_id = options.request_id or own_id
    details = {
        "outputs": requested_outputs(options.requested_outputs),
        "parameters": {"Streaming": options.streaming},
    }
    wire.send(options.model_name, tensors, request_id, **details)
    if not options.stop_after_ms:
        return
    time.sleep(options.stop_after_ms / 1000)
    if options.stop_via_request_cancel:
        wire.cancel()
        return
    stop = {
        "input_ids": row(prompt.token_ids[:1]),
        "input_lengths": row([1]),
        "request_output_len": row([0]),
        "stop": row([True], np.bool_),
    }
    wire.send(options.model_name, stop, request_id, **details)


def _sequences(
    options: Flags, results: Sequence[Tensors], prompt: Sequence[int]
) -> list[TokenSequence]:
    """Join the results, at least one, all with `output_ids` of the shape [1, beams, length]."""
    pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
    for result in results:
        lengths = result.get("sequence_length")
        for beam, token_ids in enumerate(result["output_ids"][0].tolist()):
            length = len(token_ids) if lengths is None else int(lengths[0, beam])
            pieces[_sequence_index(result), beam] += token_ids[:length]
    sequences = []
    for (_, beam), token_ids in sorted(pieces.items()):
        whole = new = token_ids
        if options.exclude_input_in_output:
            pass
        elif options.streaming:
            # A stream has only new tokens.
            whole = [*prompt, *token_ids]
        elif token_ids[: len(prompt)] == list(prompt):
            new = token_ids[len(prompt) :]
        sequences.append(TokenSequence(beam, whole, new))
    return sequences


def _sequence_index(result: Tensors) -> int:
    return int(result["sequence_index"].flat[0]) if "sequence_index" in result else 0


def _check_stopped(options: Flags, sequences: list[TokenSequence]) -> None:
    """Raise ConfigError if a stopped request came to its end all the same."""
    longest = max(len(sequence.new_token_ids) for sequence in sequences)
    if options.stop_after_ms and longest >= options.request_output_len:
        raise ConfigError(
            f"the request was to stop after {options.stop_after_ms} ms, and all "
            f"{options.request_output_len} tokens came: request more tokens, or stop earlier"
        )


def _check_output(options: Flags, sequence: TokenSequence, say: Say) -> bool:
    """Compare the output with the expected ids; print both and PASS! or FAIL!.

    Raises ConfigError for a file that has no ids.
    """
    actual = sequence.token_ids
    if options.output_tokens_csv:
        expected = read_token_ids(options.output_tokens_csv)
    else:
        expected = [*actual[: len(actual) - len(sequence.new_token_ids)], *GPT2_OUTPUT]
    passed = actual == expected
    if options.correctness_threshold < 1.0:
        equal = sum(a == e for a, e in zip(actual, expected, strict=False))
        ratio = equal / max(len(expected), 1)
        say(f"Output matches the expected ids in {ratio:.4f} of them")
        passed = ratio > options.correctness_threshold
    say(f"expected_output_ids =  {expected}")
    say(f"actual_output_ids =  {actual}")
    say("PASS!" if passed else "FAIL!")
    return passed


def _print_prompt(prompt: Encoded, say: Say) -> None:
    say("=========")
    say(f"Using pad_id:  {prompt.pad_id}")
    say(f"Using end_id:  {prompt.end_id}")
    is_long = len(prompt.token_ids) > MAX_PRINTED_TOKENS
    title = "Input sequence starts with" if is_long else "Input sequence"
    say(f"{title}:  {prompt.token_ids[:MAX_PRINTED_TOKENS]}")


def _print_output(options: Flags, sequences: list[TokenSequence], codec: Codec, say: Say) -> None:
    """Print all lines at once: clients that run together share a terminal."""
    lines = ["Got completed request"]
    if options.verbose:
        lines.append(f"sequence_length:  {[len(sequence.token_ids) for sequence in sequences]}")
    has_text = not options.input_tokens_csv
    if has_text:
        lines.append(f"Input: {options.text}")
    for sequence in sequences:
        if has_text:
            lines.append(f"Output beam {sequence.beam}: {codec.decode(sequence.new_token_ids)}")
        lines.append(f"Output sequence:  {sequence.token_ids}")
    say("\n".join(lines))


def _detail_lines(results: Sequence[Tensors]) -> Iterator[str]:
    """Yield lines about the log probabilities, logits and measurements that there are."""
    sums = {_sequence_index(result): result.get("cum_log_probs") for result in results}
    for array in sums.values():
        if array is not None:
            yield f"cum_log_probs:  {array.tolist()}"
    for name in ("output_log_probs", *_SHAPES):
        arrays = [r[name] for r in results if name in r and r[name].size]
        if name in _SHAPES:
            yield from (f"{name}.shape:  {array.shape}" for array in arrays[:1])
        else:
            yield from (f"{name}:  {array.tolist()}" for array in arrays)
    for name in _MEASURED:
        if name in results[-1]:
            yield f"{name}:  {results[-1][name].flat[0]}"
