"""Outputs of requests in HTTP front ends: merged streams, whole outputs, and client disconnects.

Knows no wire format.
"""

import asyncio
import dataclasses
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import (
    BeamLogprobs,
    PromptLogprobs,
    RequestOutput,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.frontends.field_names import Reworded, as_it_is
from loraplex.serving.backend import ReadyOutputs, TextBackend, admit_all, close_outputs
from loraplex.serving.best_of import joined
from loraplex.serving.interleaving import interleaved

T = TypeVar("T")

IndexedOutput = tuple[int, RequestOutput]
"""(index of the request, its output)."""


_INLINE_CHARACTERS = 4096
"""Shorter outputs are formatted on the event loop: handing them to a thread would cost more."""
_CHARACTERS_OF_LOGPROB = 16
"""Characters that take as long to format as one log probability."""
_CHARACTERS_OF_PIECE = 4
"""Characters that take as long to format as one piece of a sequence takes to be merged."""


class ClientDisconnectedError(Exception):
    """The client has disconnected. This is not an error of loraplex, and there is no response."""


async def until_disconnect(
    receive: Callable[[], Awaitable[Mapping[str, Any]]], work: Coroutine[Any, Any, T]
) -> T:
    """The result of work, which is cancelled as soon as the client disconnects.

    `receive` is the ASGI callable of a request whose body has been read. Raises
    ClientDisconnectedError, after what work cleans up has been awaited.
    """
    worker = asyncio.current_task()
    assert worker is not None
    watch = _Watch(receive, worker)
    try:
        return await work
    except asyncio.CancelledError:
        # Others may have cancelled the worker, too: that is not ours to end.
        if watch.has_seen_it_go and worker.uncancel() == 0:
            raise ClientDisconnectedError from None
        raise
    finally:
        watch.end()


class _Watch:
    """Waits for a client to go while a task works for it, and then cancels the task."""

    __slots__ = ("_receive", "_waiting", "_worker", "has_seen_it_go")

    def __init__(
        self, receive: Callable[[], Awaitable[Mapping[str, Any]]], worker: "asyncio.Task[Any]"
    ) -> None:
        self._receive = receive
        self._worker: asyncio.Task[Any] | None = worker
        self.has_seen_it_go = False
        # Work that never waits ends before this runs, and needs no other task.
        self._waiting: asyncio.Handle | asyncio.Task[None] = asyncio.get_running_loop().call_soon(
            self._begin
        )

    def end(self) -> None:
        self._worker = None
        self._waiting.cancel()

    def _begin(self) -> None:
        self._waiting = task = asyncio.create_task(_disconnected(self._receive))
        task.add_done_callback(self._interrupt)

    def _interrupt(self, watcher: "asyncio.Task[None]") -> None:
        if watcher.cancelled():
            return
        watcher.exception()  # marks it as retrieved: an error, too, means a disconnect
        if self._worker is not None:
            self.has_seen_it_go = True
            self._worker.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclasses.dataclass(slots=True)
class ReadyOutput:
    """Implements ReadyOutputs of a single admitted request, as `generate_all` yields them.

    The outputs of several requests are merged by tasks.
    """

    outputs: ReadyOutputs[RequestOutput] | None = None
    """Outputs of the request; None: it is not admitted, not alone, or read by tasks only."""

    def when_ready(self, read: Callable[[], bool]) -> None:
        if self.outputs is not None:
            self.outputs.when_ready(read)

    def take_ready(self) -> IndexedOutput | None:
        output = None if self.outputs is None else self.outputs.take_ready()
        return None if output is None else (0, output)


async def generate_all(
    backend: TextBackend,
    requests: Sequence[GenerateRequest],
    principal: Principal,
    reworded: Reworded = as_it_is,
    ready: ReadyOutput | None = None,
) -> AsyncGenerator[IndexedOutput, None]:
    """Admit the requests, then yield their outputs as they arrive.

    reworded: makes an error of it that names the client's own fields. ready: gets the outputs of a
    single request, so that they can be read without a task, too.
    If one is refused or fails, its error is raised and the others are aborted; closing the
    generator aborts all.
    """
    try:
        async with AsyncExitStack() as stack:
            if len(requests) == 1:
                only = await backend.generate(requests[0], principal)
                stack.push_async_callback(close_outputs, only)
                if ready is not None and isinstance(only, ReadyOutputs):
                    ready.outputs = only
                async for output in only:
                    yield 0, output
                return
            streams = await admit_all(
                lambda request: backend.generate(request, principal), requests, stack
            )
            async with aclosing(interleaved(streams)) as merged:
                async for item in merged:
                    yield item
    except LoraplexError as error:
        raise reworded(error) from None


async def gather_all(
    backend: TextBackend,
    requests: Sequence[GenerateRequest],
    principal: Principal,
    reworded: Reworded = as_it_is,
) -> list[RequestOutput]:
    """Run the requests to their ends: one whole output for each, in order."""
    pieces: list[list[RequestOutput]] = [[] for _ in requests]
    async with aclosing(generate_all(backend, requests, principal, reworded)) as outputs:
        async for index, output in outputs:
            pieces[index].append(output)
    num_pieces = sum(len(output.sequences) for outputs in pieces for output in outputs)
    return await done(
        lambda: [merge_outputs(outputs) for outputs in pieces], num_pieces * _CHARACTERS_OF_PIECE
    )


async def written(write: Callable[[], T], *outputs: RequestOutput) -> T:
    """Return the result of write, which formats the outputs.

    Parsing tool calls of long outputs takes a while, and so do many log probabilities: a thread
    does it, and other streams go on.
    """
    return await done(write, writing_work(*outputs))


async def done(write: Callable[[], T], work: int) -> T:
    """Return the result of write. work: of all outputs that it formats, from `writing_work`."""
    return write() if work <= _INLINE_CHARACTERS else await asyncio.to_thread(write)


def writing_work(*outputs: RequestOutput) -> int:
    """Return how long outputs take to format, in characters."""
    work = 0
    for output in outputs:
        for sequence in output.sequences:
            work += len(sequence.text) + logprobs_work(sequence.logprobs)
        if output.prompt_logprobs is not None:
            num_values = output.prompt_logprobs.num_values
            work += max(1, len(output.sequences)) * _CHARACTERS_OF_LOGPROB * num_values
    return work


def logprobs_work(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the work of log probabilities. All have as many likely tokens as the last."""
    if not logprobs:
        return 0
    if isinstance(logprobs, BeamLogprobs):
        return _CHARACTERS_OF_LOGPROB * logprobs.num_values
    return _CHARACTERS_OF_LOGPROB * len(logprobs) * (1 + len(logprobs[-1].top))


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merge the increments of one request; sequences are in the order of their index."""
    by_index: dict[int, list[SequenceOutput]] = {}
    for output in outputs:
        for sequence in output.sequences:
            by_index.setdefault(sequence.index, []).append(sequence)
    return msgspec.structs.replace(
        outputs[-1],
        sequences=tuple(joined(by_index[index]) for index in sorted(by_index)),
        prompt_logprobs=_first_prompt_logprobs(outputs),
    )


def _first_prompt_logprobs(outputs: Sequence[RequestOutput]) -> PromptLogprobs | None:
    given = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
    return next(given, None)
