"""Check whether a system's outputs are right when one batch holds requests of several adapters.

This is checked before anything is timed: a system that is fast because it gives every request the
first adapter has no useful figures. The base and some adapters complete prompts alone, then all at
once, twice each. Alone they must differ from each other; together, each must write what it wrote
alone. In 32 bits that means the same tokens, and those of a reference, too. In narrower weights
the kernels of a larger batch may round otherwise, and a near tie of two tokens then turns the
output; so there an output counts as its own if it begins as it should, for most of the prompts.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from comparison.systems import Running
from loraplex.bench.client import exchange_all
from loraplex.bench.completions import StreamedCompletion
from loraplex.bench.workload import PlannedRequest
from loraplex.core.errors import ConfigError

_OWN_TOKENS = 2
"""So many equal tokens at the beginning are no chance: a word is one of some 31,000."""
_WORD_LENGTH = 4
_SEED = "right answers"

Outputs = Mapping[int | None, str]
"""One prompt's output by adapter; None is the base."""


class CheckSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the check; that of a large model is small, for it takes some seconds a request."""

    num_adapters: int = 4
    num_prompts: int = 3
    prompt_tokens: int = 32
    output_tokens: int = 12

    @property
    def subjects(self) -> tuple[int | None, ...]:
        """The base and the adapters."""
        return (None, *range(self.num_adapters))

    def prompts(self, vocabulary: range) -> list[tuple[int, ...]]:
        draws = random.Random(_SEED)
        return [
            tuple(draws.choices(vocabulary, k=self.prompt_tokens)) for _ in range(self.num_prompts)
        ]

    def request(self, prompt: tuple[int, ...], adapter: int | None) -> PlannedRequest:
        return PlannedRequest(prompt, self.output_tokens, adapter, 0.0)

    def text(self, output: StreamedCompletion) -> str:
        """Return what was written. Raises ConfigError for an output that is not whole."""
        text = output.text.strip()
        if output.error or len(text) != self.output_tokens * _WORD_LENGTH:
            raise ConfigError(
                f"a request failed while its outputs were checked: {output.error or repr(text)}"
            )
        return text


STANDARD_CHECK = CheckSize()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the check found."""

    problems: tuple[str, ...]
    """Empty: all outputs are right."""
    num_equal: int
    """Outputs in a mixed batch that were token for token those given alone."""
    num_asked: int  # language: quoted (a field of the journals)
    """Number of compared outputs."""
    is_compared_with_reference: bool = False

    @property
    def is_right(self) -> bool:
        return not self.problems


async def generate_alone(
    running: Running, vocabulary: range, size: CheckSize = STANDARD_CHECK
) -> list[Outputs]:
    """Run base and adapters on each prompt, one request at a time. Raises ConfigError if one fails:
    then there is nothing to compare with.
    """
    outputs: list[Outputs] = []
    for prompt in size.prompts(vocabulary):
        requests = [size.request(prompt, adapter) for adapter in size.subjects]
        exchanges, _ = await exchange_all(running.send, requests, concurrency=1)
        texts = [size.text(running.read(exchange)) for exchange in exchanges]
        outputs.append(dict(zip(size.subjects, texts, strict=True)))
    return outputs


async def check(
    running: Running,
    vocabulary: range,
    weight_bits: int,
    reference: Sequence[Outputs] | None,
    size: CheckSize = STANDARD_CHECK,
) -> tuple[Verdict, list[Outputs]]:
    """Return the verdict, and the outputs alone. `reference`: of another system, for 32 bits.

    Raises ConfigError if a request fails.
    """
    alone = await generate_alone(running, vocabulary, size)
    is_exact = weight_bits == 32
    problems = [*_alike(alone)]
    if is_exact and reference is not None:
        problems += _unlike_reference(alone, reference)
    mixed: list[list[tuple[int | None, str]]] = []
    for prompt in size.prompts(vocabulary):
        subjects = [*size.subjects, *reversed(size.subjects)]
        requests = [size.request(prompt, adapter) for adapter in subjects]
        exchanges, _ = await exchange_all(running.send, requests, concurrency=len(requests))
        texts = [size.text(running.read(exchange)) for exchange in exchanges]
        mixed.append(list(zip(subjects, texts, strict=True)))
    problems += _not_their_own(alone, mixed, is_exact=is_exact)
    verdict = Verdict(
        problems=tuple(dict.fromkeys(problems)),
        num_equal=sum(
            text == own[adapter]
            for own, batch in zip(alone, mixed, strict=True)
            for adapter, text in batch
        ),
        num_asked=sum(map(len, mixed)),
        is_compared_with_reference=is_exact and reference is not None,
    )
    return verdict, alone


def _alike(alone: Sequence[Outputs]) -> Iterator[str]:
    for outputs in alone:
        for adapter, text in outputs.items():
            if adapter is not None and text == outputs[None]:
                yield f"{_name(adapter)} writes what the base writes"


def _unlike_reference(alone: Sequence[Outputs], reference: Sequence[Outputs]) -> Iterator[str]:
    for own, other in zip(alone, reference, strict=True):
        for adapter, text in own.items():
            if text != other[adapter]:
                same = _common_tokens(text, other[adapter])
                yield f"{_name(adapter)} alone differs from the reference at token {same + 1}"


def _not_their_own(
    alone: Sequence[Outputs],
    mixed: Sequence[Sequence[tuple[int | None, str]]],
    *,
    is_exact: bool,
) -> Iterator[str]:
    strangers = dict.fromkeys(alone[0], 0)
    for own, batch in zip(alone, mixed, strict=True):
        for adapter, text in batch:
            if text == own[adapter]:
                continue
            taken = _whose(text, own)
            if taken != _NO_ADAPTER and taken != adapter:
                yield f"{_name(adapter)} in a mixed batch got the output of {_name(taken)}"
            elif is_exact:
                same = _common_tokens(text, own[adapter])
                yield f"{_name(adapter)} in a mixed batch differs from itself at token {same + 1}"
            elif taken == _NO_ADAPTER:
                strangers[adapter] += 1
    for adapter, count in strangers.items():
        if count > len(alone):  # each prompt was sent twice
            yield f"{_name(adapter)} in a mixed batch gives outputs of its own {count} times"


_NO_ADAPTER = -1


def _whose(text: str, outputs: Outputs) -> int | None:
    """Return whose output, alone, begins most like this one; _NO_ADAPTER if none does."""
    best = max(outputs, key=lambda adapter: _common_tokens(text, outputs[adapter]))
    return best if _common_tokens(text, outputs[best]) >= _OWN_TOKENS else _NO_ADAPTER


def _common_tokens(one: str, other: str) -> int:
    """Tokens that both texts begin with."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same // _WORD_LENGTH


def _name(adapter: int | None) -> str:
    return "the base" if adapter is None else f"adapter {adapter}"
