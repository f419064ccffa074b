"""One sequence of an answer, as it grows."""

from collections.abc import Sequence

from loraplex.core.output import FinishReason, Logits, RequestTiming, SequenceOutput
from loraplex.frontends.kserve.models.convert import Generation
from loraplex.serving.logits_files import first_rows


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
        self.logits: list[Logits] = []
        """Of new tokens."""
        self.prompt_logits: tuple[Logits, ...] = ()
        self.timing: RequestTiming | None = None
        """Once the whole request has ended."""

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
        if output.cumulative_logprob is not None:
            self.cum_log_prob = output.cumulative_logprob
        self.logits.extend(first_rows(output.logits, num_tokens))
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
        self.logits = []
        self.prompt_logits = ()
        self.text = ""
