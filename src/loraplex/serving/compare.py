"""Compares one prompt over many adapters: all completions in one batch, next to the base's.

An adapter that fails yields an error of its own; the others go on.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Sequence

import msgspec

from loraplex.core.adapter import AdapterChoice
from loraplex.core.errors import LoraplexError
from loraplex.core.output import (
    FinishReason,
    RequestOutput,
    RequestTiming,
    ResolvedAdapter,
    TokenLogprob,
)
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.serving.backend import Admission, Backend, admit_together


@dataclasses.dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first position where two outputs have different tokens. Everything earlier is the same,
    so the two models' log probabilities there have the same context.

    A log probability is None if the token is not among the 20 likeliest of that model.
    """

    position: int
    """Index in the completion, from 0."""
    token_id: int
    base_token_id: int
    token_logprob: float
    """Log probability of this completion's token, by this completion's model."""
    token_logprob_by_base: float | None
    base_token_logprob: float | None
    """Log probability of the base's token, by this completion's model."""
    base_token_logprob_by_base: float


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a completion from the base's to the same prompt."""

    num_same_tokens: int
    """Number of equal tokens at the beginning."""
    mean_logprob_difference: float | None
    """Mean log probability of these tokens here less the base's; None if there are none."""
    first: FirstDifference | None
    """None: equal as far as both go."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedOutput:
    """Completion by one choice of adapters."""

    adapters: tuple[ResolvedAdapter, ...]
    """Empty: the base model."""
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    """Token ids with the end token, if there is one."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each token, with the likeliest ones."""
    finish_reason: FinishReason
    timing: RequestTiming
    versus_base: Difference | None = None
    """None for the base itself, and where no comparison is possible."""

    @property
    def logprob(self) -> float:
        """Log probability of the whole completion: the sum of its tokens'."""
        return sum(token.logprob for token in self.logprobs)

    @property
    def ttft_ms(self) -> float:
        """Time from arrival to the first token, with the load of its adapters."""
        return max(0, self.timing.first_token_ns - self.timing.arrival_ns) / 1e6

    @property
    def total_ms(self) -> float:
        return max(0, self.timing.last_token_ns - self.timing.arrival_ns) / 1e6


Compared = ComparedOutput | LoraplexError
"""A completion, or the error instead."""


def comparison_requests(
    backend: Backend, request: GenerateRequest, choices: Sequence[tuple[AdapterChoice, ...]]
) -> list[GenerateRequest]:
    """The request once for each choice of adapters; empty is the base model.

    All draw with the same seed, and have the log probabilities that are needed to compare. Raises
    InvalidParameterError for sampling that none of them could have.
    """
    request.sampling.validate()
    sampling = _comparable(request.sampling)
    return [
        msgspec.structs.replace(
            request, request_id=backend.new_request_id(), adapters=adapters, sampling=sampling
        )
        for adapters in choices
    ]


async def compare(
    backend: Backend, requests: Sequence[GenerateRequest], principal: Principal
) -> list[Compared]:
    """Run the requests of comparison_requests together, to their ends."""
    async with contextlib.AsyncExitStack() as stack:
        streams = await admit_together(backend, requests, principal, stack)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_output(stream)) for stream in streams]
        outputs = [task.result() for task in tasks]
    base = next(
        (a for a, r in zip(outputs, requests, strict=True) if not r.adapters and is_output(a)), None
    )
    return [_against(output, base) for output in outputs]


def is_output(compared: Compared) -> bool:
    return isinstance(compared, ComparedOutput)


def difference(output: ComparedOutput, base: ComparedOutput) -> Difference:
    """Compare two completions of the same prompt."""
    pairs = list(zip(output.logprobs, base.logprobs, strict=False))
    same = next(
        (i for i, (mine, its) in enumerate(pairs) if mine.token_id != its.token_id), len(pairs)
    )
    mean = None
    if same:
        mean = sum(mine.logprob - its.logprob for mine, its in pairs[:same]) / same
    first = None if same == len(pairs) else _first_difference(same, *pairs[same])
    return Difference(same, mean, first)


def _comparable(sampling: SamplingParams) -> SamplingParams:
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return msgspec.structs.replace(sampling, n=1, seed=seed, logprobs=MAX_LOGPROBS)


async def _output(stream: Admission) -> Compared:
    if isinstance(stream, LoraplexError):
        return stream
    try:
        return _whole([output async for output in stream])
    except LoraplexError as error:
        return error


def _whole(outputs: Sequence[RequestOutput]) -> ComparedOutput:
    last = outputs[-1]
    pieces = [piece for output in outputs for piece in output.sequences]
    reason = pieces[-1].finish_reason
    assert last.timing is not None, "the last output has the timing"
    assert reason is not None, "a sequence's last piece has its finish reason"
    return ComparedOutput(
        adapters=last.adapters,
        prompt_token_ids=last.prompt_token_ids,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish_reason=reason,
        timing=last.timing,
    )


def _against(output: Compared, base: Compared | None) -> Compared:
    if output is base or not isinstance(output, ComparedOutput):
        return output
    if not isinstance(base, ComparedOutput):
        return output
    return dataclasses.replace(output, versus_base=difference(output, base))


def _first_difference(position: int, mine: TokenLogprob, its: TokenLogprob) -> FirstDifference:
    return FirstDifference(
        position=position,
        token_id=mine.token_id,
        base_token_id=its.token_id,
        token_logprob=mine.logprob,
        token_logprob_by_base=dict(its.top).get(mine.token_id),
        base_token_logprob=dict(mine.top).get(its.token_id),
        base_token_logprob_by_base=its.logprob,
    )
