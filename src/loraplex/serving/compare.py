"""Compares completions by different adapters: all in one batch, next to the base's of their prompt.

A completion that fails yields an error of its own, and a cancelled one what it has; the others go
on.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

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
from loraplex.serving.backend import Admission, Backend, Cancellable, admit_together
from loraplex.serving.continuation import response_seed
from loraplex.serving.interleaving import interleaved


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
    backend: Backend, requests: Sequence[GenerateRequest]
) -> list[GenerateRequest]:
    """Return the requests as a comparison runs them; one without adapters is of the base model.

    Those without a seed all draw with the same one, and all have the log probabilities that are
    needed to compare. Raises InvalidParameterError for sampling that none of them could have.
    """
    for request in requests:
        request.sampling.validate()
    has_own = [request.sampling.seed is not None for request in requests]
    shared = 0 if all(has_own) else response_seed()
    return [
        msgspec.structs.replace(
            request.with_sampling(_comparable(request.sampling, shared)),
            request_id=backend.new_request_id(),
        )
        for request in requests
    ]


async def compare(
    backend: Backend, requests: Sequence[GenerateRequest], principal: Principal
) -> list[Compared]:
    """Run the requests of comparison_requests together, to their ends."""
    async with begun_comparison(backend, requests, principal) as comparison:
        return await comparison.ends()


@contextlib.asynccontextmanager
async def begun_comparison(
    backend: Backend, requests: Sequence[GenerateRequest], principal: Principal
) -> AsyncIterator["RunningComparison"]:
    """Admit the requests of comparison_requests as one batch; the context's end aborts them."""
    async with contextlib.AsyncExitStack() as stack:
        yield RunningComparison(requests, await admit_together(backend, requests, principal, stack))


class RunningComparison:
    """Admitted requests, what has come of each, and whether it can be compared yet."""

    def __init__(
        self, requests: Sequence[GenerateRequest], admissions: Sequence[Admission]
    ) -> None:
        self._requests = requests
        self._admissions = admissions
        self._bases = [index for index, request in enumerate(requests) if not request.adapters]
        self._outputs: list[list[RequestOutput]] = [[] for _ in requests]
        self._ends: dict[int, Compared] = {}
        self._waiting: list[int] = []
        """Indexes of those that have ended and are to be compared with a base that has not."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._requests)

    @property
    def refusals(self) -> list[LoraplexError]:
        """Return the errors of the requests that were not admitted."""
        return [each for each in self._admissions if isinstance(each, LoraplexError)]

    async def progress(self) -> AsyncGenerator[tuple[int, RequestOutput | Compared], None]:
        """Yield what comes, with the index of its request.

        The last item of each is the whole completion, or its error. It comes as soon as its
        difference from the base is known.
        """
        streams = [_items(each) for each in self._admissions]
        async with contextlib.aclosing(interleaved(streams)) as items:
            async for index, item in items:
                if isinstance(item, RequestOutput):
                    yield index, item
                for settled in self._take(index, item):
                    yield settled, self._compared(settled)

    async def ends(self) -> list[Compared]:
        """Return the results of all requests, once they are there."""
        async with contextlib.aclosing(self.progress()) as progress:
            results = {
                index: item async for index, item in progress if not isinstance(item, RequestOutput)
            }
        return [results[index] for index in range(len(self._requests))]

    def cancel(self, index: int) -> bool:
        """End one request with what it has; False: it has ended already.

        Its last output comes as usual, with FinishReason.ABORT unless the end came first.
        """
        outputs = self._admissions[index]
        if index in self._ends or not isinstance(outputs, Cancellable):
            return False
        outputs.cancel()
        return True

    def _take(self, index: int, item: RequestOutput | LoraplexError) -> list[int]:
        """Return the indexes of the requests whose results are known with this item."""
        if isinstance(item, LoraplexError):
            self._ends[index] = item
        else:
            self._outputs[index].append(item)
            if not item.finished:
                return []
            self._ends[index] = _whole(self._outputs[index])
        ended, self._waiting = [*self._waiting, index], []
        settled = [each for each in ended if self._is_settled(each)]
        self._waiting = [each for each in ended if each not in settled]
        return settled

    def _compared(self, index: int) -> Compared:
        """Return the result of a request that `_take` has named."""
        output, base = self._ends[index], self._base_of(index)
        if base is None or base == index or not isinstance(output, ComparedOutput):
            return output
        return dataclasses.replace(output, versus_base=self._difference(output, base))

    def _base_of(self, index: int) -> int | None:
        """Index of the first request without adapters that has the same prompt and not failed."""
        prompt = self._requests[index].prompt
        return next(
            (
                base
                for base in self._bases
                if self._requests[base].prompt == prompt
                and not isinstance(self._ends.get(base), LoraplexError)
            ),
            None,
        )

    def _is_settled(self, index: int) -> bool:
        output, base = self._ends[index], self._base_of(index)
        if base is None or base in self._ends or not isinstance(output, ComparedOutput):
            return True
        if output.finish_reason is FinishReason.ABORT:  # its client waits for no more
            return True
        return self._difference(output, base).first is not None

    def _difference(self, output: ComparedOutput, base: int) -> Difference:
        pieces = (piece for each in self._outputs[base] for piece in each.sequences)
        return difference(output.logprobs, [token for piece in pieces for token in piece.logprobs])


def difference(output: Sequence[TokenLogprob], base: Sequence[TokenLogprob]) -> Difference:
    """Compare the tokens of two completions of the same prompt."""
    pairs = list(zip(output, base, strict=False))
    same = next(
        (i for i, (mine, its) in enumerate(pairs) if mine.token_id != its.token_id), len(pairs)
    )
    mean = None
    if same:
        mean = sum(mine.logprob - its.logprob for mine, its in pairs[:same]) / same
    first = None if same == len(pairs) else _first_difference(same, *pairs[same])
    return Difference(same, mean, first)


def _comparable(sampling: SamplingParams, shared_seed: int) -> SamplingParams:
    seed = shared_seed if sampling.seed is None else sampling.seed
    return msgspec.structs.replace(sampling, n=1, seed=seed, logprobs=MAX_LOGPROBS)


async def _items(
    admission: Admission,
) -> AsyncGenerator[RequestOutput | LoraplexError, None]:
    """Yield the outputs of a request; its error is the last item."""
    if isinstance(admission, LoraplexError):
        yield admission
        return
    try:
        async for output in admission:
            yield output
    except LoraplexError as error:
        yield error


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
