"""Output tensors of a completion's logits and measurements."""

from collections.abc import Sequence

import numpy as np

from loraplex.core.output import Logits, RequestTiming
from loraplex.frontends.kserve.models.completion import Completion
from loraplex.frontends.kserve.tensors import Array, Tensor, numbers, to_bf16

Batch = Sequence[Sequence[Completion]]
"""Per element its sequences, equally many in each."""


def logits_tensors(batch: Batch) -> list[Tensor]:
    """context_logits [batch, longest prompt, vocabulary], generation_logits [batch, sequences,
    longest completion, vocabulary]; shorter ones end with zeros."""
    generation = batch[0][0].generation
    tensors = []
    if generation.returns_context_logits and any(
        completions[0].prompt_logits for completions in batch
    ):
        prompts = [_rows(completions[0].prompt_logits) for completions in batch]
        datatype = generation.context_logits_datatype
        tensors.append(_logits("context_logits", datatype, _padded(prompts)))
    if generation.returns_generation_logits and any(a.logits for row in batch for a in row):
        flat = _padded(
            [_rows(completion.logits) for completions in batch for completion in completions]
        )
        shape = (len(batch), len(batch[0]), *flat.shape[1:])
        datatype = generation.generation_logits_datatype
        tensors.append(_logits("generation_logits", datatype, flat.reshape(shape)))
    return tensors


def no_logits(batch: Batch) -> list[Tensor]:
    """A single zero each, for requests that want none."""
    generation = batch[0][0].generation
    context = np.zeros((len(batch), 1, 1), np.float32)
    ours = np.zeros((len(batch), len(batch[0]), 1, 1), np.float32)
    return [
        _logits("context_logits", generation.context_logits_datatype, context),
        _logits("generation_logits", generation.generation_logits_datatype, ours),
    ]


def _logits(name: str, datatype: str, array: Array) -> Tensor:
    """datatype: what the model's configuration declares."""
    match datatype:
        case "FP16":
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
        case "BF16":
            array = to_bf16(array)
    return Tensor.of(name, datatype, array)


def _rows(pieces: Sequence[Logits]) -> Array:
    """[rows, vocabulary]; of no pieces [0, 0]."""
    num_rows = sum(piece.num_rows for piece in pieces)
    if not num_rows:
        return np.zeros((0, 0), np.float32)
    rows = [np.frombuffer(piece.data, np.float32).reshape(piece.num_rows, -1) for piece in pieces]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)  # other threads run meanwhile


def _padded(arrays: Sequence[Array]) -> Array:
    """[arrays, most rows, vocabulary]."""
    if len(arrays) == 1:
        return arrays[0][np.newaxis]
    padded = np.zeros(
        (len(arrays), *(max(array.shape[axis] for array in arrays) for axis in (0, 1))), np.float32
    )
    for row, array in zip(padded, arrays, strict=True):
        row[: array.shape[0], : array.shape[1]] = array
    return padded


def perf_tensors(batch: Batch) -> list[Tensor]:
    """Tensors of return_perf_metrics: per element, in the response that ends it."""
    elements = [(completions, completions[0].timing) for completions in batch]
    timings = [timing for _, timing in elements if timing is not None]
    if len(timings) < len(elements):
        return []
    reused = [timing.num_cached_tokens // _block_size(batch) for timing in timings]
    total = [_num_blocks(completions) for completions in batch]
    return [
        *_column("kv_cache_alloc_new_blocks", "INT32", np.subtract(total, reused).tolist()),
        *_column("kv_cache_reused_blocks", "INT32", reused),
        *_column("kv_cache_alloc_total_blocks", "INT32", total),
        *_column("arrival_time_ns", "INT64", [timing.arrival_ns for timing in timings]),
        *_column("first_scheduled_time_ns", "INT64", [t.first_scheduled_ns for t in timings]),
        *_column("first_token_time_ns", "INT64", [t.first_token_ns for t in timings]),
        *_column("last_token_time_ns", "INT64", [t.last_token_ns for t in timings]),
        *_column("acceptance_rate", "FP32", [_acceptance_rate(t) for t in timings]),
        *_column("total_accepted_draft_tokens", "INT32", [t.num_accepted_tokens for t in timings]),
        *_column("total_draft_tokens", "INT32", [t.num_draft_tokens for t in timings]),
    ]


def _column(name: str, datatype: str, values: Sequence[float]) -> list[Tensor]:
    return [numbers(name, datatype, [[value] for value in values])]


def _block_size(batch: Batch) -> int:
    return batch[0][0].generation.block_size


def _num_blocks(completions: Sequence[Completion]) -> int:
    """KV blocks of the prompt and completion of one sequence; its last token has no KV."""
    completion = completions[0]
    longest = max(completion.num_output_tokens for completion in completions)
    return -(
        -(completion.num_input_tokens + max(longest - 1, 0)) // completion.generation.block_size
    )


def _acceptance_rate(timing: RequestTiming) -> float:
    return timing.num_accepted_tokens / timing.num_draft_tokens if timing.num_draft_tokens else 0.0
