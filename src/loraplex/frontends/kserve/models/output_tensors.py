"""What the backend generated -> output tensors.

Token ids of `output_ids` and log probabilities of shorter sequences are padded with -1, as the
original pads, logits with zeros. Text is one string per sequence, flat over batch and sequences.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from loraplex.core.output import (
    FinishReason,
    Logits,
    RequestTiming,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.frontends.kserve.models.convert import TritonGeneration
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM, VLLM, BackendDialect, ModelKind
from loraplex.frontends.kserve.tensors import (
    DATATYPES,
    Array,
    Tensor,
    numbers,
    strings,
    to_bf16,
)
from loraplex.frontends.streams import logprobs_work
from loraplex.serving.logits_files import first_rows

_BYTES_OF_CHARACTER = 256
"""Bytes of logits that are copied in the time that one character takes to format."""


class SequenceSoFar(msgspec.Struct, eq=False):
    """One sequence so far. `drain` starts the next piece of a streamed completion."""

    generation: TritonGeneration
    index: int
    """Index of the sequence in its request."""
    finish_reason: FinishReason | None = None
    is_sent: bool = False
    """Nothing of it is left to send."""
    has_begun: bool = False
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_new_tokens: int = 0
    """Since the last piece."""
    cum_log_prob: float = 0.0
    token_ids: list[int] = []
    entries: list[TokenLogprob] = []
    """Log probabilities of new tokens, if they are known."""
    text: str = ""
    """Text of the output alone."""
    shown_prompt: Sequence[int] | None = None
    """Tokens of a prompt whose text comes first."""
    logits: list[Logits] = []
    """Logits of new tokens."""
    prompt_logits: tuple[Logits, ...] = ()
    timing: RequestTiming | None = None
    """Once the whole request has ended."""
    pooled: bytes = b""
    """Value of the prompt of a pooled request: float32, little-endian."""

    def begin(self, prompt_token_ids: Sequence[int], num_encoder_tokens: int = 0) -> None:
        """Take the prompt into the completion, if the client wants to see it there.

        An encoder's input, the first tokens, is no part of the completion.
        """
        if self.has_begun:
            return
        self.has_begun = True
        self.num_input_tokens = len(prompt_token_ids)
        prompt_token_ids = prompt_token_ids[num_encoder_tokens:]
        generation = self.generation
        if generation.is_streamed or generation.excludes_input:
            return
        self.token_ids.extend(prompt_token_ids)
        if isinstance(generation.request.prompt, str):
            self.shown_prompt = prompt_token_ids

    @property
    def whole_text(self) -> str:
        """Return the text that the client gets."""
        if self.shown_prompt is None:
            return self.text
        generation, prompt = self.generation, self.generation.request.prompt
        assert isinstance(prompt, str)
        if generation.show_prompt is not None and self.shown_prompt:
            prompt = generation.show_prompt(self.shown_prompt)
        return prompt + self.text

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def writing_work(self) -> int:
        """Return how long its outputs take to make, as `streams.writing_work` does."""
        num_tokens = len(self.token_ids)  # with a prompt that is shown
        if not (self.entries or self.logits or self.prompt_logits):
            return num_tokens
        num_bytes = sum(len(piece.data) for piece in (*self.logits, *self.prompt_logits))
        return num_tokens + logprobs_work(self.entries) + num_bytes // _BYTES_OF_CHARACTER

    @property
    def log_probs(self) -> list[float]:
        return [entry.logprob for entry in self.entries]

    def add(self, output: SequenceOutput) -> None:
        """Append what one output brings; the token that ended it is left out."""
        num_tokens = len(output.token_ids)
        if output.finish_reason is not None:
            num_tokens -= self._ends_with_end_token(output)
        self.num_output_tokens += num_tokens
        self.num_new_tokens += num_tokens
        self.token_ids.extend(output.token_ids[:num_tokens])
        if output.logprobs:
            entries = output.logprobs[:num_tokens]
            self.entries.extend(entries)
            self.cum_log_prob += sum([entry.logprob for entry in entries])
        if output.cumulative_logprob is not None:
            self.cum_log_prob = output.cumulative_logprob
        if output.logits:
            self.logits.extend(first_rows(output.logits, num_tokens))
        self.text += output.text
        self.finish_reason = output.finish_reason

    def _ends_with_end_token(self, output: SequenceOutput) -> bool:
        if output.has_end_token and self.generation.leaves_out_ends:
            return True
        return (
            output.finish_reason is FinishReason.STOP
            and bool(output.token_ids)
            and output.token_ids[-1] in self.generation.end_token_ids
            and output.stop_reason in (None, output.token_ids[-1])
        )

    def drain(self) -> None:
        """Forget what has been sent. Counts and the cumulative log probability stay."""
        self.is_sent = self.is_finished or not self.generation.is_streamed
        self.num_new_tokens = 0
        self.token_ids = []
        self.entries = []
        self.logits = []
        self.prompt_logits = ()
        if not self.generation.accumulates_text:
            self.text = ""


PADDING = -1
RUNNING = "None"
"""The finish reason of a sequence of the vLLM backend that goes on."""
NO_LOGPROBS = "null"
Batch = Sequence[Sequence[SequenceSoFar]]
"""Per element its sequences, equally many in each."""
_DATATYPES: Final = {row.name: row.datatype for row in TENSORRT_LLM.outputs}


def output_tensors(
    kind: ModelKind,
    batch: Batch,
    *,
    batch_index: int | None = None,
    sequence_index: int | None = None,
) -> list[Tensor]:
    """The outputs of `batch`.

    Shapes: output_ids [batch, sequences, longest], sequence_length and cum_log_probs [batch,
    sequences], output_log_probs [batch, sequences, longest], text_output [batch * sequences], all
    numbers of an element [batch, 1]; for those of vLLM's dialect see `_vllm_tensors`.
    """
    if kind.dialect is BackendDialect.VLLM:
        tensors = _vllm_tensors(batch[0])
        return _of_ensemble(kind, tensors) if kind.output_names else tensors
    generation = batch[0][0].generation
    tensors = _contents(kind, batch)
    if generation.returns_log_probs:
        tensors += _log_probs(batch)
    if generation.returns_context_logits or generation.returns_generation_logits:
        tensors += _logits_tensors(batch)
    if generation.sends_all_outputs:
        tensors += _not_computed(batch, {tensor.name for tensor in tensors})
    numbers_of: dict[str, Sequence[float]] = {}
    if batch_index is not None:
        numbers_of["batch_index"] = [batch_index]
    if sequence_index is not None:
        numbers_of["sequence_index"] = [sequence_index]
    if generation.returns_num_input_tokens:
        numbers_of["num_input_tokens"] = [of[0].num_input_tokens for of in batch]
    if generation.returns_num_output_tokens:
        numbers_of["num_output_tokens"] = [sum(a.num_output_tokens for a in of) for of in batch]
    if generation.returns_perf_metrics:
        numbers_of |= _measured(batch)
    return tensors + [
        numbers(name, _DATATYPES[name], [[value] for value in values])
        for name, values in numbers_of.items()
    ]


def _pooled(batch: Batch) -> list[Tensor]:
    """Values of prompts [batch, longest]: zeros follow those that are shorter.

    A request that was stopped before has none. As text they are a JSON list.
    """
    name = batch[0][0].generation.pooled_output
    rows = [np.frombuffer(completions[0].pooled, "<f4") for completions in batch]
    if not all(map(len, rows)):
        return []
    if name == "text_output":
        return [strings(name, [json.dumps(row.tolist()) for row in rows])]
    values = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for padded, row in zip(values, rows, strict=True):
        padded[: len(row)] = row
    return [Tensor.of(name, "FP32", values)]


def _contents(kind: ModelKind, batch: Batch) -> list[Tensor]:
    """Values of prompts, or text, or token ids and how many."""
    if batch[0][0].generation.pooled_output:
        return _pooled(batch)
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
        row = kind.outputs_by_name.get(tensor.name)
        has_batch = row is not None and len(tensor.shape) > len(row.dims)
        unbatched.append(tensor.rows(0, math.prod(tensor.shape[1:])) if has_batch else tensor)
    return unbatched


# ---------------------------------------------------------------- log probabilities and logits


def _log_probs(batch: Batch) -> list[Tensor]:
    cumulative = [[a.cum_log_prob for a in completions] for completions in batch]
    per_token = [[a.log_probs for a in completions] for completions in batch]
    return [
        numbers("cum_log_probs", "FP32", cumulative),
        _padded("output_log_probs", "FP32", per_token),
    ]


def _padded(name: str, datatype: str, rows: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Return a tensor of [rows, sequences, values of the longest sequence]."""
    longest = max(len(values) for row in rows for values in row)
    shape = (len(rows), len(rows[0]), longest)
    array = np.full(shape, PADDING, DATATYPES[datatype].wire_dtype)
    for padded, row in zip(array, rows, strict=True):
        for place, values in zip(padded, row, strict=True):
            place[: len(values)] = values  # one at a time: other threads run in between
    return Tensor.of(name, datatype, array)


def _not_computed(batch: Batch, computed: Set[str]) -> Iterator[Tensor]:
    """Yield zeros for log probabilities and logits that were not requested."""
    shape = (len(batch), len(batch[0]))
    if "cum_log_probs" not in computed:
        longest = max(a.num_new_tokens for completions in batch for a in completions)
        yield Tensor.of("cum_log_probs", "FP32", np.zeros(shape, np.float32))
        yield Tensor.of("output_log_probs", "FP32", np.zeros((*shape, longest), np.float32))
    for name, empty in (("context_logits", shape[:1]), ("generation_logits", shape)):
        if name not in computed:
            yield _logits(name, batch, np.zeros((*empty, 1, 1), np.float32))


def _logits_tensors(batch: Batch) -> list[Tensor]:
    """context_logits [batch, longest prompt, vocabulary], generation_logits [batch, sequences,
    longest completion, vocabulary]."""
    generation = batch[0][0].generation
    tensors = []
    if generation.returns_context_logits and any(of[0].prompt_logits for of in batch):
        prompts = [_rows(completions[0].prompt_logits) for completions in batch]
        tensors.append(_logits("context_logits", batch, _padded_rows(prompts)))
    if generation.returns_generation_logits and any(a.logits for of in batch for a in of):
        flat = _padded_rows([_rows(completion.logits) for of in batch for completion in of])
        shape = (len(batch), len(batch[0]), *flat.shape[1:])
        tensors.append(_logits("generation_logits", batch, flat.reshape(shape)))
    return tensors


def _logits(name: str, batch: Batch, array: Array) -> Tensor:
    """A tensor of the type that the model's configuration declares."""
    datatype: str = getattr(batch[0][0].generation, f"{name}_datatype")
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


def _padded_rows(arrays: Sequence[Array]) -> Array:
    """[arrays, most rows, vocabulary]."""
    if len(arrays) == 1:
        return arrays[0][np.newaxis]
    padded = np.zeros(
        (len(arrays), *(max(array.shape[axis] for array in arrays) for axis in (0, 1))), np.float32
    )
    for row, array in zip(padded, arrays, strict=True):
        row[: array.shape[0], : array.shape[1]] = array
    return padded


# ---------------------------------------------------------------- measurements


def _num_blocks(completions: Sequence[SequenceSoFar], _: RequestTiming) -> int:
    """KV blocks of the prompt and completion of one sequence; its last token has no KV."""
    completion = completions[0]
    longest = max(completion.num_output_tokens for completion in completions)
    num_tokens = completion.num_input_tokens + max(longest - 1, 0)
    return math.ceil(num_tokens / completion.generation.block_size)


def _num_reused(completions: Sequence[SequenceSoFar], timing: RequestTiming) -> int:
    return timing.num_cached_tokens // completions[0].generation.block_size


_MEASURED: Final[Mapping[str, Callable[[Sequence[SequenceSoFar], RequestTiming], float]]] = (
    MappingProxyType(
        {
            "kv_cache_alloc_new_blocks": lambda of, t: _num_blocks(of, t) - _num_reused(of, t),
            "kv_cache_reused_blocks": _num_reused,
            "kv_cache_alloc_total_blocks": _num_blocks,
            "arrival_time_ns": lambda _, t: t.arrival_ns,
            "first_scheduled_time_ns": lambda _, t: t.first_scheduled_ns,
            "first_token_time_ns": lambda _, t: t.first_token_ns,
            "last_token_time_ns": lambda _, t: t.last_token_ns,
            "acceptance_rate": lambda _, t: t.num_accepted_tokens / (t.num_draft_tokens or 1),
            "total_accepted_draft_tokens": lambda _, t: t.num_accepted_tokens,
            "total_draft_tokens": lambda _, t: t.num_draft_tokens,
        }
    )
)
"""Outputs of return_perf_metrics, each a number of an element."""


def _measured(batch: Batch) -> Mapping[str, Sequence[float]]:
    """Numbers of _MEASURED: per element, in the response that ends it."""
    ended = [(of, timing) for of in batch if (timing := of[0].timing) is not None]
    if len(ended) < len(batch):
        return {}
    return {name: [value_of(*each) for each in ended] for name, value_of in _MEASURED.items()}


# ---------------------------------------------------------------- models of the vLLM backend


def _vllm_tensors(completions: Sequence[SequenceSoFar]) -> list[Tensor]:
    """The outputs of one request: what it wished for comes in every response.

    Shapes have no batch dimension: [sequences] each, num_input_tokens [1]. Where a stream brings a
    sequence in pieces, text, log probabilities and num_output_tokens are of the piece.
    """
    returned = completions[0].generation.returned
    if completions[0].generation.pooled_output:
        tensors = _pooled([completions])
    else:
        tensors = [strings("text_output", [each.whole_text for each in completions])]
    for row in VLLM.outputs:
        if row.name in returned:
            some = completions[:1] if row.name == "num_input_tokens" else completions
            values = [_VLLM_VALUES[row.name](completion) for completion in some]
            is_text = row.datatype == "BYTES"
            tensors.append(
                strings(row.name, values) if is_text else numbers(row.name, row.datatype, values)
            )
    return tensors


def _finish_reason(completion: SequenceSoFar) -> str:
    return RUNNING if completion.finish_reason is None else completion.finish_reason.value


def _logprobs(completion: SequenceSoFar) -> str:
    """A JSON list: for each token the chosen and the most likely ones, by token id."""
    token_text = completion.generation.token_text
    if token_text is None:
        return NO_LOGPROBS
    text_of = functools.cache(token_text)
    rows = []
    for entry in completion.entries:
        shown = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            shown.setdefault(token_id, (logprob, rank))
        row = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, (logprob, rank) in shown.items()
        }
        rows.append(json.dumps(row))  # one at a time: other threads run in between
    return f"[{', '.join(rows)}]"


_VLLM_VALUES: Final[Mapping[str, Callable[[SequenceSoFar], Any]]] = MappingProxyType(
    {
        "finish_reason": _finish_reason,
        "cumulative_logprob": lambda completion: completion.cum_log_prob,
        "logprobs": _logprobs,
        "num_input_tokens": lambda completion: completion.num_input_tokens,
        "num_output_tokens": lambda completion: completion.num_new_tokens,
    }
)
"""Outputs that a request wishes for, each a value of a sequence."""
