"""One sequence of a completion, as it grows."""

from collections.abc import Sequence

import msgspec

from loraplex.core.output import (
    FinishReason,
    Logits,
    RequestTiming,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.frontends.kserve.models.convert import TritonGeneration
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

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        """Take the prompt into the completion, if the client wants to see it there."""
        if self.has_begun:
            return
        self.has_begun = True
        self.num_input_tokens = len(prompt_token_ids)
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
