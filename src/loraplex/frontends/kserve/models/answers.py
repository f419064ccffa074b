"""What the backend generated -> output tensors.

Token ids of `output_ids` and log probabilities of shorter sequences are padded with -1, as the
original pads. Text is one string per sequence, flat over batch and sequences.
"""

from collections.abc import Sequence
from typing import TypeVar

from loraplex.core.output import FinishReason, SequenceOutput
from loraplex.frontends.kserve.models.convert import Generation
from loraplex.frontends.kserve.models.kinds import ModelKind
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings

PADDING = -1

_T = TypeVar("_T")


class Answer:
    """One sequence so far. `drain` starts the next piece of a streamed answer."""

    def __init__(self, generation: Generation, index: int) -> None:
        self.generation = generation
        self.index = index
        """Of the sequence, in its request."""
        self.is_finished = False
        self.is_sent = False
        """Nothing of it is left to send."""
        self._has_begun = False
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.cum_log_prob = 0.0
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.text = ""

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        """Take the prompt into the answer, if the client wants to see it there."""
        if self._has_begun:
            return
        self._has_begun = True
        self.num_input_tokens = len(prompt_token_ids)
        generation = self.generation
        if generation.is_streamed or generation.excludes_input:
            return
        self.token_ids.extend(prompt_token_ids)
        if isinstance(generation.request.prompt, str):
            self.text = generation.request.prompt

    def add(self, output: SequenceOutput) -> None:
        """Append what one output brings; the token that ended it is left out."""
        num_tokens = len(output.token_ids) - self._ends_with_end_token(output)
        self.num_output_tokens += num_tokens
        self.token_ids.extend(output.token_ids[:num_tokens])
        log_probs = [entry.logprob for entry in output.logprobs[:num_tokens]]
        self.log_probs.extend(log_probs)
        self.cum_log_prob += sum(log_probs)
        self.text += output.text
        self.is_finished = output.finish_reason is not None

    def _ends_with_end_token(self, output: SequenceOutput) -> bool:
        return (
            output.finish_reason is FinishReason.STOP
            and bool(output.token_ids)
            and output.token_ids[-1] in self.generation.end_token_ids
            and output.stop_reason in (None, output.token_ids[-1])
        )

    def drain(self) -> None:
        """Forget what has been sent. Counts and the cumulative log probability stay."""
        self.is_sent = self.is_finished or not self.generation.is_streamed
        self.token_ids = []
        self.log_probs = []
        self.text = ""


def output_tensors(
    kind: ModelKind,
    batch: Sequence[Sequence[Answer]],
    *,
    batch_index: int | None = None,
    sequence_index: int | None = None,
) -> list[Tensor]:
    """The outputs of `batch`: per element its sequences, equally many in each.

    Shapes: output_ids [batch, sequences, longest], sequence_length and cum_log_probs [batch,
    sequences], output_log_probs [batch, sequences, longest], text_output [batch * sequences].
    """
    if kind.takes_text:
        tensors = [strings("text_output", [a.text for answers in batch for a in answers])]
    else:
        ids = [[a.token_ids for a in answers] for answers in batch]
        lengths = [[len(a.token_ids) for a in answers] for answers in batch]
        tensors = [
            numbers("output_ids", "INT32", _padded(ids, PADDING)),
            numbers("sequence_length", "INT32", lengths),
        ]
    tensors += _log_probs(batch)
    for name, index in (("batch_index", batch_index), ("sequence_index", sequence_index)):
        if index is not None:
            tensors.append(numbers(name, "INT32", [[index]]))
    return [*tensors, *_counts(batch)]


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
