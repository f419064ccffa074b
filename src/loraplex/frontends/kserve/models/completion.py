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
from loraplex.frontends.kserve.models.convert import Generation
from loraplex.serving.logits_files import first_rows


class Completion(msgspec.Struct, eq=False):
    """One sequence so far. `drain` starts the next piece of a streamed completion."""

    generation: Generation
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
        prompt = generation.request.prompt
        if isinstance(prompt, str):
            show = generation.show_prompt
            self.text = prompt if show is None or not prompt_token_ids else show(prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

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
