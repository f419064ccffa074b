"""Penalties on tokens that a row has seen. Only the logits of these tokens are touched."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

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
