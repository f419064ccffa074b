"""Results of the library's methods, built from a request's incremental outputs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loraplex.core.class_format import ClassFormat
from loraplex.core.output import (
    FinishReason,
    Logits,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    SequenceOutput,
    TokenLogprob,
)

Prompt = str | Sequence[int]
"""Text, or token ids."""
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]
    """One per token if requested, else empty."""
    cumulative_logprob: float | None = None
    """Sum over a beam, or over one of several ranked completions; else None."""
    logits: Array | None = None
    """float32 [tokens, vocabulary], if requested."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """The result of one prompt; `text`, `token_ids` and so on are those of the first completion."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    adapters: tuple[ResolvedAdapter, ...]
    """The adapters used, with digests and scales; empty for the base model."""
    timing: RequestTiming
    """Times and counts of the request's stages."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_logits: Array | None = None
    """float32 [prompt tokens, vocabulary], if requested."""

    @property
    def adapter(self) -> ResolvedAdapter | None:
        """The first of `adapters`; None for the base model."""
        return self.adapters[0] if self.adapters else None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.completions[0].logprobs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The vector of one text."""

    prompt: Prompt
    """Text that was given, without the text of `prompt_name`."""
    prompt_token_ids: tuple[int, ...]
    vector: npt.NDArray[np.float32]
    """float32 [dimensions]"""
    adapters: tuple[ResolvedAdapter, ...]
    """The adapters used, with digests and scales; empty for the base model."""
    timing: RequestTiming


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Classified:
    """The class of one text."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    label: str
    """Name of the likeliest label."""
    labels: tuple[str, ...]
    """Names of all labels, in the order of `probs`."""
    probs: npt.NDArray[np.float32]
    """float32 [num_classes]: probabilities, or scores where no activation is used."""
    adapters: tuple[ResolvedAdapter, ...]
    """The adapters used, with digests and scales; empty for the base model."""
    timing: RequestTiming

    @property
    def num_classes(self) -> int:
        return len(self.probs)


def classified(
    prompt: Prompt, outputs: Sequence[RequestOutput], classes: ClassFormat
) -> Classified:
    """Return the result of a request that classifies."""
    result = embedded(prompt, outputs)
    labels = classes.labels_of(len(result.vector))
    return Classified(
        prompt=prompt,
        prompt_token_ids=result.prompt_token_ids,
        label=labels[int(result.vector.argmax())],
        labels=labels,
        probs=result.vector,
        adapters=result.adapters,
        timing=result.timing,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """How well a document fits a query."""

    query: str
    document: str
    score: float
    adapters: tuple[ResolvedAdapter, ...]
    """The adapters used, with digests and scales; empty for the base model."""


def embedded(prompt: Prompt, outputs: Sequence[RequestOutput]) -> Embedded:
    """Return the result of a pooled request."""
    last = outputs[-1]
    assert last.timing is not None, "the last output has the timing"
    vector = np.frombuffer(last.pooled, "<f4").astype(np.float32)
    return Embedded(prompt, last.prompt_token_ids, vector, last.adapters, last.timing)


def collect(prompt: Prompt, outputs: Sequence[RequestOutput], n: int) -> Generated:
    """Join the incremental outputs of a request."""
    pieces = [piece for output in outputs for piece in output.sequences]
    last = outputs[-1]
    assert last.timing is not None, "the last output has the timing"
    prompt_logprobs = (output.prompt_logprobs for output in outputs if output.prompt_logprobs)
    return Generated(
        prompt=prompt,
        prompt_token_ids=last.prompt_token_ids,
        completions=tuple(
            _completion([piece for piece in pieces if piece.index == index]) for index in range(n)
        ),
        adapters=last.adapters,
        timing=last.timing,
        prompt_logprobs=next((tuple(values) for values in prompt_logprobs), None),
        prompt_logits=_array(logits for output in outputs for logits in output.prompt_logits),
    )


def _completion(pieces: Sequence[SequenceOutput]) -> Completion:
    last = pieces[-1]
    assert last.finish_reason is not None, "a sequence's last piece has its finish reason"
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        cumulative_logprob=last.cumulative_logprob,
        logits=_array(logits for piece in pieces for logits in piece.logits),
    )


def _array(pieces: Iterable[Logits]) -> Array | None:
    arrays = [np.frombuffer(p.data, np.float32).reshape(p.num_rows, -1) for p in pieces]
    return np.concatenate(arrays) if arrays else None
