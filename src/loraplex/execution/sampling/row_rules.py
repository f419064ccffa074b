"""Rules of a row's parameters for its next token's logits, given the earlier tokens.

Penalties on tokens that the row has seen, and tokens that may not come next: indices that grow
with the row.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.plan import RowAdded
from loraplex.core.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of one row: which are of the prompt, how often each was produced."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._num_prompt_tokens = len(self._places)
        self._ids = np.array(list(self._places), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self.add(output)

    def add(self, token_ids: Sequence[int]) -> None:
        """They were produced."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
            self._counts[place] += 1

    def _grow(self) -> None:
        more = np.zeros(max(16, len(self._ids)), dtype=np.int64)
        self._ids = np.concatenate((self._ids, more))
        self._counts = np.concatenate((self._counts, more))

    def seen(self, then: Sequence[int]) -> "SeenTokens":
        """Tokens seen if `then` had been produced, too."""
        counts = self
        if then:
            counts = self._copy()
            counts.add(then)
        num_seen = len(counts._places)
        in_prompt = np.arange(num_seen) < counts._num_prompt_tokens
        return SeenTokens(counts._ids[:num_seen], in_prompt, counts._counts[:num_seen])

    def _copy(self) -> "TokenCounts":
        copy = TokenCounts((), ())
        copy._places, copy._num_prompt_tokens = dict(self._places), self._num_prompt_tokens
        copy._ids, copy._counts = self._ids.copy(), self._counts.copy()
        return copy


class SeenTokens(NamedTuple):
    """m distinct tokens of one row."""

    token_ids: IntArray  # [m]
    in_prompt: npt.NDArray[np.bool_]  # [m]
    counts: IntArray  # [m]: in the output


def penalized(
    logits: torch.Tensor, seen: Sequence[SeenTokens], params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Repetition penalty over prompt and output, presence and frequency penalty over output.

    logits [m] float32 are those of the seen tokens, row after row; so is the result. Repetition as
    in CTRL (arXiv:1909.05858) and transformers, then the other two as OpenAI documents them.
    """
    sizes = [len(row.token_ids) for row in seen]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(device)

    device = logits.device
    counts = torch.from_numpy(np.concatenate([row.counts for row in seen])).to(device)
    in_prompt = torch.from_numpy(np.concatenate([row.in_prompt for row in seen])).to(device)
    repetition = spread([p.repetition_penalty for p in params])
    produced = counts > 0
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(in_prompt | produced, repeated, logits)
    frequency = spread([p.frequency_penalty for p in params])
    presence = spread([p.presence_penalty for p in params])
    return logits - frequency * counts - presence * produced


class NGramIndex:
    """What followed each run of n - 1 tokens, so that no run of n comes twice.

    As transformers' NoRepeatNGramLogitsProcessor, over prompt and output.
    """

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        self._size = size
        self._following: dict[tuple[int, ...], list[int]] = {}
        self._tail: tuple[int, ...] = ()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """They came."""
        known = (*self._tail, *token_ids)
        for prefix, token_id in self._runs(known):
            self._following.setdefault(prefix, []).append(token_id)
        self._tail = self._last_of(known)

    def banned(self, then: Sequence[int]) -> list[int]:
        """What may not follow if `then` came, too; a token may be named twice."""
        known = (*self._tail, *then)
        prefix = self._last_of(known)
        if len(prefix) < self._size - 1:
            return []
        banned = self._following.get(prefix, [])
        if not then:
            return banned
        return [*banned, *(token_id for before, token_id in self._runs(known) if before == prefix)]

    def _runs(self, known: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The runs of n tokens whose last is new: the tail is one shorter than a run."""
        for *prefix, token_id in zip(*(known[i:] for i in range(self._size)), strict=False):
            yield tuple(prefix), token_id

    def _last_of(self, known: Sequence[int]) -> tuple[int, ...]:
        return tuple(known[max(0, len(known) - self._size + 1) :])


class BadWords:
    """Runs of tokens that are not to come: the last of a run is banned after the others.

    As transformers' NoBadWordsLogitsProcessor, over prompt and output; but an end token that is
    named alone is banned like any other.
    """

    def __init__(self, runs: Iterable[tuple[int, ...]], token_ids: Sequence[int]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *before, last in runs:
            if before:
                self._after.setdefault(before[-1], []).append((tuple(before), last))
            else:
                self._always.append(last)
        longest = max((len(b) for of in self._after.values() for b, _ in of), default=0)
        self._num_kept = longest
        self._tail: tuple[int, ...] = ()
        self.add(token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        """They came."""
        self._tail = self._tail_after(token_ids)

    def banned(self, then: Sequence[int]) -> list[int]:
        """What may not follow if `then` came, too; a token may be named twice."""
        tail = self._tail_after(then)
        candidates = self._after.get(tail[-1], []) if tail else []
        return [
            *self._always,
            *(last for before, last in candidates if tail[-len(before) :] == before),
        ]

    def _tail_after(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        known = (*self._tail, *token_ids[-self._num_kept :]) if self._num_kept else ()
        return known[max(0, len(known) - self._num_kept) :]


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
