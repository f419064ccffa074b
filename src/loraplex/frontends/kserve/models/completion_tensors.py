"""What the backend generated -> output tensors.

Token ids of `output_ids` and log probabilities of shorter sequences are padded with -1, as the
original pads. Text is one string per sequence, flat over batch and sequences.
"""

import math
from collections.abc import Iterator, Sequence, Set

import msgspec
import numpy as np

from loraplex.frontends.kserve.datatypes import DATATYPES
from loraplex.frontends.kserve.models.completion import Completion
from loraplex.frontends.kserve.models.kinds import Dialect, ModelKind
from loraplex.frontends.kserve.models.measured import logits_tensors, no_logits, perf_tensors
from loraplex.frontends.kserve.models.vllm_tensors import vllm_tensors
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings

PADDING = -1


def output_tensors(
    kind: ModelKind,
    batch: Sequence[Sequence[Completion]],
    *,
    batch_index: int | None = None,
    sequence_index: int | None = None,
) -> list[Tensor]:
    """The outputs of `batch`: per element its sequences, equally many in each.

    Shapes: output_ids [batch, sequences, longest], sequence_length and cum_log_probs [batch,
    sequences], output_log_probs [batch, sequences, longest], text_output [batch * sequences];
    those of vLLM's dialect are in vllm_tensors.
    """
    if kind.dialect is Dialect.VLLM:
        tensors = vllm_tensors(batch[0])
        return _of_ensemble(kind, tensors) if kind.output_names else tensors
    generation = batch[0][0].generation
    tensors = _contents(kind, batch)
    if generation.returns_log_probs:
        tensors += _log_probs(batch)
    if generation.returns_context_logits or generation.returns_generation_logits:
        tensors += logits_tensors(batch)
    if generation.sends_all_outputs:
        tensors += _not_computed(batch, {tensor.name for tensor in tensors})
    if batch_index is not None:
        tensors.append(numbers("batch_index", "INT32", [[batch_index]]))
    if sequence_index is not None:
        tensors.append(numbers("sequence_index", "INT32", [[sequence_index]]))
    if generation.returns_num_input_tokens:
        num_input = [[completions[0].num_input_tokens] for completions in batch]
        tensors.append(numbers("num_input_tokens", "INT32", num_input))
    if generation.returns_num_output_tokens:
        num_output = [[sum(a.num_output_tokens for a in completions)] for completions in batch]
        tensors.append(numbers("num_output_tokens", "INT32", num_output))
    if generation.returns_perf_metrics:
        tensors += perf_tensors(batch)
    return tensors


def _contents(kind: ModelKind, batch: Sequence[Sequence[Completion]]) -> list[Tensor]:
    """Text, or token ids and how many."""
    if kind.takes_text:
        return [
            strings("text_output", [a.whole_text for completions in batch for a in completions])
        ]
    ids = [[a.token_ids for a in completions] for completions in batch]
    lengths = [[len(a.token_ids) for a in completions] for completions in batch]
    return [
        _padded("output_ids", "INT32", ids),
        numbers("sequence_length", "INT32", lengths),
    ]


def _of_ensemble(kind: ModelKind, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a step that an ensemble has, under its names and with a batch of 1."""
    names = kind.output_names
    return [
        msgspec.structs.replace(tensor, name=names[tensor.name], shape=(1, *tensor.shape))
        for tensor in tensors
        if tensor.name in names
    ]


def without_batch(kind: ModelKind, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of one element as a model has them that knows no batches."""
    unbatched = []
    for tensor in tensors:
        row = kind.output(tensor.name)
        has_batch = row is not None and len(tensor.shape) > len(row.dims)
        unbatched.append(tensor.rows(0, math.prod(tensor.shape[1:])) if has_batch else tensor)
    return unbatched


def _log_probs(batch: Sequence[Sequence[Completion]]) -> list[Tensor]:
    cumulative = [[a.cum_log_prob for a in completions] for completions in batch]
    per_token = [[a.log_probs for a in completions] for completions in batch]
    return [
        numbers("cum_log_probs", "FP32", cumulative),
        _padded("output_log_probs", "FP32", per_token),
    ]


def _not_computed(batch: Sequence[Sequence[Completion]], computed: Set[str]) -> Iterator[Tensor]:
    """Yield zeros for log probabilities and logits that were not requested."""
    if "cum_log_probs" not in computed:
        longest = max(a.num_new_tokens for completions in batch for a in completions)
        shape = (len(batch), len(batch[0]))
        yield Tensor.of("cum_log_probs", "FP32", np.zeros(shape, np.float32))
        yield Tensor.of("output_log_probs", "FP32", np.zeros((*shape, longest), np.float32))
    for tensor in no_logits(batch):
        if tensor.name not in computed:
            yield tensor


def _padded(name: str, datatype: str, rows: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Return a tensor of [rows, sequences, values of the longest sequence]."""
    longest = max(len(values) for row in rows for values in row)
    shape = (len(rows), len(rows[0]), longest)
    array = np.full(shape, PADDING, DATATYPES[datatype].wire_dtype)
    for padded, row in zip(array, rows, strict=True):
        for place, values in zip(padded, row, strict=True):
            place[: len(values)] = values  # one at a time: other threads run in between
    return Tensor.of(name, datatype, array)
