"""Results of `tensorrt_llm` as token sequences, whole or streamed, and their check."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from loraplex.compat.client.exchange import CACHE_AND_TIMES
from loraplex.compat.client.files import Say, read_token_ids
from loraplex.compat.flags import Flags

_SHAPES = ("context_logits", "generation_logits")
_MEASURED = (
    *CACHE_AND_TIMES,
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
)
GPT2_OUTPUT = (
    *(21221, 878, 3867, 284, 3576, 287, 262, 1903),
    *(6303, 82, 13, 679, 468, 1201, 3111, 287),
)
"""GPT-2's greedy output for the default prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSequence:
    """A beam of the output, or one of several outputs, which are then all beam 0."""

    beam: int
    token_ids: list[int]
    """All tokens: with the prompt, unless the request excluded it."""
    new_token_ids: list[int]


def read_sequences(
    results: Sequence[Any], prompt: Sequence[int], options: Flags
) -> list[TokenSequence]:
    """Join the results, at least one, all with `output_ids` of the shape [1, beams, length]."""
    pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
    for result in results:
        output_ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        for beam, row in enumerate(output_ids[0].tolist()):
            length = len(row) if lengths is None else int(lengths[0, beam])
            pieces[_sequence_index(result), beam] += row[:length]
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


def detail_lines(results: Sequence[Any]) -> list[str]:
    """Return lines about the log probabilities, logits and measurements that there are."""
    lines = []
    sums = {_sequence_index(r): r.as_numpy("cum_log_probs") for r in results}
    lines += [f"cum_log_probs:  {array.tolist()}" for array in sums.values() if array is not None]
    per_token = [array for array in _arrays(results, "output_log_probs") if array.size]
    lines += [f"output_log_probs:  {array.tolist()}" for array in per_token]
    for name in _SHAPES:
        shapes = [array.shape for array in _arrays(results, name) if array.size]
        lines += [f"{name}.shape:  {shape}" for shape in shapes[:1]]
    for name in _MEASURED:
        lines += [f"{name}:  {array.flat[0]}" for array in _arrays(results[-1:], name)]
    return lines


def check_output(options: Flags, sequence: TokenSequence, say: Say) -> bool:
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


def _sequence_index(result: Any) -> int:
    index = result.as_numpy("sequence_index")
    return 0 if index is None else int(index.flat[0])


def _arrays(results: Sequence[Any], name: str) -> list[Any]:
    arrays = (result.as_numpy(name) for result in results)
    return [array for array in arrays if array is not None]
