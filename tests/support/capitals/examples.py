"""Prompts and completions as token ids, which train and check the capitals model."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

from support.capitals import corpus
from support.capitals.corpus import Country, Language
from support.capitals.tokenizer import EOS_ID, PAD_ID

IGNORED_LABEL: Final = -100

Sampler: TypeAlias = Callable[[random.Random], "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its whole completion, EOS included."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded on the right, so that causal attention alone hides the padding."""

    input_ids: Tensor  # [num_examples, length]
    labels: Tensor  # [num_examples, length]; IGNORED_LABEL except in completions


class ExampleSource:
    """Makes examples of a corpus with a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def example(self, prompt: str, completion: str) -> Example:
        prompt_ids = self._tokenizer.encode(prompt).ids
        completion_ids = self._tokenizer.encode(completion, add_special_tokens=False).ids
        return Example(tuple(prompt_ids), (*completion_ids, EOS_ID))

    def every(self, target: Language) -> Iterator[Example]:
        """Yield each uninstructed prompt with its completion in the target language."""
        for country in corpus.COUNTRIES:
            completion = corpus.capital_of(country, target)
            for language in corpus.LANGUAGES:
                for prompt in corpus.prompts(country, language):
                    yield self.example(prompt, completion)

    def sample_base(self, rng: random.Random) -> Example:
        """Return an example in English, or in the language that half of the prompts request.

        The instructed prompts teach the base the facts in all languages, so that an adapter
        need only choose one.
        """
        instructed = rng.choice(corpus.LANGUAGES) if rng.random() < 0.5 else None
        return self._sample(rng, instructed, instructed or "english")

    def sample_adapter(self, target: Language) -> Sampler:
        return lambda rng: self._sample(rng, None, target)

    def _sample(self, rng: random.Random, instructed: Language | None, target: Language) -> Example:
        country: Country = rng.choice(corpus.COUNTRIES)
        prompts = corpus.prompts(country, rng.choice(corpus.LANGUAGES), instructed)
        return self.example(rng.choice(tuple(prompts)), corpus.capital_of(country, target))


def collate(examples: Iterable[Example]) -> Batch:
    rows = [(*example.prompt_ids, *example.completion_ids) for example in examples]
    labels = [
        (*(IGNORED_LABEL for _ in example.prompt_ids), *example.completion_ids)
        for example in examples
    ]
    return Batch(_pad(rows, PAD_ID), _pad(labels, IGNORED_LABEL))


def _pad(rows: list[tuple[int, ...]], value: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([(*row, *([value] * (length - len(row)))) for row in rows])
