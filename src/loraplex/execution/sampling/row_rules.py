"""Rules of a row's parameters for its next token's logits, given the earlier tokens."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from loraplex.core.plan import RowAdded
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.sampling.penalties import TokenCounts
from loraplex.execution.sampling.token_bans import BadWords, NGramIndex

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
_WORD_BITS = 32


@dataclasses.dataclass(slots=True, eq=False)
class RowRules:
    """State of a row's logits processors. None: the row does not use it.

    Tokens out of the vocabulary are left out: they never occur.
    """

    vocab_size: int
    bias: tuple[IntArray, FloatArray] | None
    """Token ids, and what is added to their logits."""
    counts: TokenCounts | None
    """Counts for the penalties."""
    ngrams: NGramIndex | None
    bad_words: BadWords | None
    suppressed: list[int]
    """Tokens that wait for min_tokens."""
    min_tokens: int
    allowed: npt.NDArray[np.int32] | None
    """A bitmask of the vocabulary, as Kernels.apply_bitmask takes it."""
    num_outputs: int

    @classmethod
    def of(cls, added: RowAdded, vocab_size: int) -> "RowRules | None":
        """None if nothing is ever done to the row's logits, but by a grammar."""
        params = added.sampling
        if not needs_rules(params):
            return None
        prompt = added.token_ids[: added.num_prompt_tokens]
        output = added.token_ids[added.num_prompt_tokens :]
        size = params.no_repeat_ngram_size
        return cls(
            vocab_size=vocab_size,
            bias=_bias(params.logit_bias, vocab_size),
            counts=TokenCounts(prompt, output) if params.has_penalties else None,
            ngrams=NGramIndex(size, added.token_ids) if size else None,
            bad_words=_bad_words(params.bad_token_ids, added.token_ids, vocab_size),
            suppressed=_in_vocabulary(added.generation.suppressed_token_ids, vocab_size),
            min_tokens=params.min_tokens,
            allowed=token_bitmask(params.allowed_token_ids, vocab_size)
            if params.allowed_token_ids
            else None,
            num_outputs=len(output),
        )

    def add(self, token_ids: Sequence[int]) -> None:
        """They were produced."""
        self.num_outputs += len(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids)
        if self.ngrams is not None:
            self.ngrams.add(token_ids)
        if self.bad_words is not None:
            self.bad_words.add(token_ids)

    def banned(self, then: Sequence[int]) -> list[int]:
        """What may not come if `then` was produced, too; a token may be named twice."""
        banned: list[int] = []
        if self.ngrams is not None:
            banned += self.ngrams.banned(then)
        if self.bad_words is not None:
            banned += self.bad_words.banned(then)
        if self.num_outputs + len(then) < self.min_tokens:
            banned += self.suppressed
        return banned


def needs_rules(params: SamplingParams) -> bool:
    """Whether anything is done to a row's logits, but by a grammar."""
    return bool(
        params.logit_bias
        or params.has_penalties
        or params.no_repeat_ngram_size
        or params.bad_token_ids
        or params.min_tokens
        or params.allowed_token_ids
    )


def token_bitmask(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(vocab_size / 32)]: these tokens' bits are 1, as Kernels.apply_bitmask wants."""
    bits = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
    bits[_in_vocabulary(token_ids, vocab_size)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _bias(
    pairs: Sequence[tuple[int, float]], vocab_size: int
) -> tuple[IntArray, FloatArray] | None:
    known = [(token_id, bias) for token_id, bias in pairs if 0 <= token_id < vocab_size]
    if not known:
        return None
    token_ids, biases = zip(*known, strict=True)
    return np.array(token_ids, dtype=np.int64), np.array(biases, dtype=np.float32)


def _bad_words(
    runs: Sequence[tuple[int, ...]], token_ids: Sequence[int], vocab_size: int
) -> BadWords | None:
    known = [run for run in runs if len(_in_vocabulary(run, vocab_size)) == len(run)]
    return BadWords(known, token_ids) if known else None


def _in_vocabulary(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
