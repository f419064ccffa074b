"""What the backend generated -> output tensors.

Token ids of `output_ids` and log probabilities of shorter sequences are padded with -1, as the
original pads. Text is one string per sequence, flat over batch and sequences.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from loraplex.frontends.kserve.models.answer import Answer
from loraplex.frontends.kserve.models.kinds import Dialect, ModelKind
from loraplex.frontends.kserve.models.measured import logits_tensors, perf_tensors
from loraplex.frontends.kserve.models.vllm_answers import vllm_tensors
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings

PADDING = -1

_T = TypeVar("_T")


def output_tensors(
    kind: ModelKind,
    batch: Sequence[Sequence[Answer]],
    *,
    batch_index: int | None = None,
    sequence_index: int | None = None,
) -> list[Tensor]:
    """The outputs of `batch`: per element its sequences, equally many in each.

    Shapes: output_ids [batch, sequences, longest], sequence_length and cum_log_probs [batch,
    sequences], output_log_probs [batch, sequences, longest], text_output [batch * sequences];
    those of vLLM's dialect are in vllm_answers.
    """
    if kind.dialect is Dialect.VLLM:
        return vllm_tensors(batch[0])
    if kind.takes_text:
        tensors = [strings("text_output", [a.text for answers in batch for a in answers])]
    else:
        ids = [[a.token_ids for a in answers] for answers in batch]
        lengths = [[len(a.token_ids) for a in answers] for answers in batch]
        tensors = [
            numbers("output_ids", "INT32", _padded(ids, PADDING)),
            numbers("sequence_length", "INT32", lengths),
        ]
    tensors += [*_log_probs(batch), *logits_tensors(batch)]
    for name, index in (("batch_index", batch_index), ("sequence_index", sequence_index)):
        if index is not None:
            tensors.append(numbers(name, "INT32", [[index]]))
    return [*tensors, *_counts(batch), *perf_tensors(batch)]


def without_batch(kind: ModelKind, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of one element as a model has them that knows no batches."""
    unbatched = []
    for tensor in tensors:
        row = kind.output(tensor.name)
        has_batch = row is not None and len(tensor.shape) > len(row.dims)
        array = tensor.array[0] if has_batch else tensor.array
        unbatched.append(dataclasses.replace(tensor, array=array))
    return unbatched


def _log_probs(batch: Sequence[Sequence[Answer]]) -> list[Tensor]:
    if not batch[0][0].generation.returns_log_probs:
        return []
    cumulative = [[a.cum_log_prob for a in answers] for answers in batch]
    per_token = [[a.log_probs for a in answers] for answers in batch]
    return [
        numbers("cum_log_probs", "FP32", cumulative),
        numbers("output_log_probs", "FP32", _padded(per_token, float(PADDING))),
    ]


def _counts(batch: Sequence[Sequence[Answer]]) -> list[Tensor]:
    """Per element; the output tokens of all its sequences together."""
    tensors = []
    if batch[0][0].generation.returns_num_input_tokens:
        num_input = [[answers[0].num_input_tokens] for answers in batch]
        tensors.append(numbers("num_input_tokens", "INT32", num_input))
    if batch[0][0].generation.returns_num_output_tokens:
        num_output = [[sum(a.num_output_tokens for a in answers)] for answers in batch]
        tensors.append(numbers("num_output_tokens", "INT32", num_output))
    return tensors


def _padded(rows: Sequence[Sequence[Sequence[_T]]], padding: _T) -> list[list[list[_T]]]:
    """All innermost lists as long as the longest."""
    longest = max(len(values) for row in rows for values in row)
    return [[[*values, *[padding] * (longest - len(values))] for values in row] for row in rows]
