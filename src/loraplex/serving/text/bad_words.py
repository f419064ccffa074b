"""Texts that are not to come, as runs of tokens."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from loraplex.core.sampling_params import SamplingParams


class Encode(Protocol):
    def __call__(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


def with_bad_token_ids(sampling: SamplingParams, encode: Encode) -> SamplingParams:
    """The same, its bad_words among the bad_token_ids."""
    if not sampling.bad_words:
        return sampling
    runs = dict.fromkeys((*sampling.bad_token_ids, *token_runs(sampling.bad_words, encode)))
    return msgspec.structs.replace(sampling, bad_words=(), bad_token_ids=tuple(runs))


def token_runs(words: Iterable[str], encode: Encode) -> Iterable[tuple[int, ...]]:
    """How each word is spelled at the beginning of a text and after a space, as in vLLM."""
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (word, bare, f" {bare}"):
            run = tuple(encode(text, add_special_tokens=False))
            if run:
                yield run
