"""Results of `tensorrt_llm` -> sequences, whether they came whole or in pieces."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from loraplex.compat.client.exchange import CACHE_AND_TIMES
from loraplex.compat.client.token_options import TokenOptions

_SHAPES = ("context_logits", "generation_logits")
_MEASURED = (
    *CACHE_AND_TIMES,
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSequence:
    beam: int
    token_ids: list[int]
    """With the prompt, unless the request asked for no prompt."""
    new_token_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenAnswer:
    sequences: tuple[TokenSequence, ...]
    """The beams of one answer, or the answers of several, each then of beam 0."""
    details: tuple[str, ...]
    """Lines about log probabilities, logits and measurements, as far as they came."""


def read_answer(
    results: Sequence[Any], prompt: Sequence[int], options: TokenOptions
) -> TokenAnswer:
    """results: at least one, all with `output_ids` of shape [1, beams, length]."""
    pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
    for result in results:
        first = _sequence_index(result)
        output_ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        for beam, row in enumerate(output_ids[0].tolist()):
            length = len(row) if lengths is None else int(lengths[0, beam])
            pieces[first, beam] += row[:length]
    sequences = tuple(
        _sequence(beam, pieces[index, beam], prompt, options) for index, beam in sorted(pieces)
    )
    return TokenAnswer(sequences, tuple(_details(results)))


def _sequence(
    beam: int, token_ids: list[int], prompt: Sequence[int], options: TokenOptions
) -> TokenSequence:
    """A stream has only new tokens, so the prompt is put before them."""
    if options.streaming:
        whole = token_ids if options.exclude_input_in_output else [*prompt, *token_ids]
        return TokenSequence(beam, whole, token_ids)
    if options.exclude_input_in_output or token_ids[: len(prompt)] != list(prompt):
        return TokenSequence(beam, token_ids, token_ids)
    return TokenSequence(beam, token_ids, token_ids[len(prompt) :])


def _details(results: Sequence[Any]) -> list[str]:
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


def _sequence_index(result: Any) -> int:
    index = result.as_numpy("sequence_index")
    return 0 if index is None else int(index.flat[0])


def _arrays(results: Sequence[Any], name: str) -> list[Any]:
    arrays = (result.as_numpy(name) for result in results)
    return [array for array in arrays if array is not None]
