"""One output of EchoBackend, token by token: lengths, stop strings, log probabilities."""

import array
import codecs
import itertools
from collections.abc import Sequence

from loraplex.core.output import FinishReason, Logits, SequenceOutput, TokenLogprob
from loraplex.core.sampling_params import SamplingParams
from loraplex.testing import echo_tokenizer


def echo_text(model: str, adapters: Sequence[str], prompt: str, index: int = 0) -> str:
    """Return the text of sequence `index`: `model+adapter: prompt`, then ` #index` from 1 on."""
    suffix = f" #{index}" if index else ""
    return f"{'+'.join((model, *adapters))}: {prompt}{suffix}"


def echo_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """A made-up log probability: the token is the most likely one, its successors follow.

    The token has -(token_id % 7 + 1) / 16, each next one is 1 lower: exact in binary.
    """
    logprob = -(token_id % 7 + 1) / 16
    top = tuple(
        ((token_id + step) % echo_tokenizer.NUM_BYTES if step else token_id, logprob - step)
        for step in range(num_top)
    )
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=1, top=top)


def echo_logits(token_ids: Sequence[int]) -> Logits:
    """Made-up logits, one row for each token: 1 for the token, 0 for all others."""
    rows = array.array("f", bytes(4 * echo_tokenizer.VOCAB_SIZE * len(token_ids)))
    for index, token_id in enumerate(token_ids):
        rows[index * echo_tokenizer.VOCAB_SIZE + token_id] = 1.0
    return Logits(rows.tobytes(), len(token_ids))


class EchoSequence:
    """The text, then the end token; the text repeats while the sequence may not end yet."""

    def __init__(self, index: int, text: str, sampling: SamplingParams, max_tokens: int) -> None:
        self.num_tokens = 0
        """Generated so far, the end token included."""
        self.is_finished = False
        self._index = index
        self._sampling = sampling
        self._max_tokens = min(sampling.max_tokens or max_tokens, max_tokens)
        token_ids = echo_tokenizer.encode(text, add_special_tokens=False)
        if sampling.ignore_eos:
            self._tokens = itertools.cycle(token_ids)
        else:
            needed = min(sampling.min_tokens, self._max_tokens)
            repeats = max(1, -(-needed // len(token_ids)))
            self._tokens = itertools.cycle([*token_ids * repeats, echo_tokenizer.EOS_TOKEN_ID])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._num_sent = 0
        self._token_ids: list[int] = []

    def step(self) -> SequenceOutput:
        """Generate one token."""
        token_id = next(self._tokens)
        self.num_tokens += 1
        self._token_ids.append(token_id)
        is_end = token_id == echo_tokenizer.EOS_TOKEN_ID
        if is_end or (token_id in self._sampling.stop_token_ids and self._may_stop):
            if self._sampling.include_stop_in_output:
                self._text += self._stop_token_text(token_id)
            return self._finish(token_id, None if is_end else token_id)
        self._text += self._decoder.decode(echo_tokenizer.token_bytes(token_id))
        if self._ends_with_stop_sequence():
            return self._finish(token_id, None)
        stop = self._find_stop()
        if stop is not None:
            start, stop_string = stop
            end = start + len(stop_string) * self._sampling.include_stop_in_output
            self._text = self._text[:end]
            return self._finish(token_id, stop_string)
        if self.num_tokens >= self._max_tokens:
            self.is_finished = True
            self._text += self._decoder.decode(b"", final=True)
            return self._output(token_id, len(self._text), FinishReason.LENGTH)
        return self._output(token_id, len(self._text) - self._num_held_back(), None)

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._sampling.min_tokens

    def _ends_with_stop_sequence(self) -> bool:
        runs = self._sampling.stop_token_sequences
        return any(tuple(self._token_ids[-len(run) :]) == run for run in runs)

    def _find_stop(self) -> tuple[int, str] | None:
        """(start, stop string) of the leftmost match."""
        found = [(self._text.find(stop, self._num_sent), stop) for stop in self._sampling.stop]
        return min((match for match in found if match[0] >= 0), default=None)

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that may grow into a stop string."""
        lengths = (
            length
            for stop in self._sampling.stop
            for length in range(1, len(stop))
            if self._text.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def _stop_token_text(self, token_id: int) -> str:
        skips = self._sampling.skip_special_tokens
        return echo_tokenizer.decode((token_id,), skip_special_tokens=skips)

    def _finish(self, token_id: int, stop_reason: str | int | None) -> SequenceOutput:
        self.is_finished = True
        return self._output(token_id, len(self._text), FinishReason.STOP, stop_reason)

    def _output(
        self,
        token_id: int,
        num_chars: int,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None = None,
    ) -> SequenceOutput:
        text = self._text[self._num_sent : num_chars]
        self._num_sent = max(self._num_sent, num_chars)
        num_top = self._sampling.logprobs
        logprobs = () if num_top is None else (echo_logprob(token_id, num_top),)
        logits = (echo_logits((token_id,)),) if self._sampling.return_logits else ()
        return SequenceOutput(
            self._index, text, (token_id,), logprobs, finish_reason, stop_reason, logits
        )
