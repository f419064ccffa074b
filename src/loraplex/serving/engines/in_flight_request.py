"""In-flight request, from its submission to its last output, across engines that die.

It keeps the delivered tokens, so an engine that replaces a dead one continues after them and yields
the same tokens that the dead one would have: sampling depends only on the request's seed and the
position of the token.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final, Protocol

import msgspec

from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import LoraplexError
from loraplex.core.output import EngineOutput, FinishReason, RequestTiming, SequenceDelta
from loraplex.core.request import EngineRequest, RequestBatch
from loraplex.core.task import Generate
from loraplex.serving.logits_files import discard


class EngineOutputs(Protocol):
    """The outputs of one request as a generation reads them; `OutputStream` is one."""

    async def take(self) -> list[EngineOutput]: ...

    def leave(self) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class OutputStream:
    """The outputs of one request. A slow reader finds them merged; it never holds a step back."""

    pending: list[EngineOutput] = dataclasses.field(default_factory=list)
    """Outputs that were not read yet."""
    _waiting: asyncio.Future[None] | None = None
    """What the task that reads awaits."""
    _is_left: bool = False
    _pass_on: Callable[[EngineOutput], None] | None = None
    _read: Callable[[], bool] | None = None

    def put(self, output: EngineOutput) -> None:
        if self._is_left:
            discard((output,))
        elif self._pass_on is not None:
            self._pass_on(output)
        else:
            self.pending.append(output)
            if self._waiting is not None and not self._waiting.done():
                self._wake(self._waiting)

    async def take(self) -> list[EngineOutput]:
        """All outputs since the last call; waits for at least one. None follow a finished one."""
        while not self.pending:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self.take_pending()

    def take_pending(self) -> list[EngineOutput]:
        """All outputs since the last call, which may be none."""
        outputs, self.pending = self.pending, []
        return outputs

    def when_ready(self, read: Callable[[], bool]) -> None:
        """Call a function with the outputs of a step, while a task waits in `take`.

        It returns whether it has read `pending`: then the task goes on to wait, and no task runs
        for the step. What it raises, `take` raises.
        """
        self._read = read

    def _wake(self, waiting: "asyncio.Future[None]") -> None:
        try:
            is_read = self._read is not None and self._read()
        except Exception as error:
            waiting.set_exception(error)
        else:
            if not is_read:
                waiting.set_result(None)

    def pass_on(self, pass_on: Callable[[EngineOutput], None]) -> None:
        """Call a function with each output, from the first on; `take` is not called then."""
        for output in self.take_pending():
            pass_on(output)
        self._pass_on = pass_on

    def leave(self) -> None:
        """Give up reading: outputs, present and future, are dropped, and their files deleted."""
        self._is_left = True
        discard(self.take_pending())


CRASH_BLAME: Final = 3
"""Blame of a request that was in a step when the engine crashed."""
KILL_BLAME: Final = 1
"""The same when it was killed: from outside, by an operator or by a system short of memory. And of
every request when an engine died between two steps: the load of an adapter may have crashed it."""
SUSPECT_BLAME: Final = 3
"""Blame from which on a request is given to the next engine alone."""
MAX_BLAME: Final = 6
"""Then it is given up: two crashes, or six kills, and it got no further."""
PLACE_OUTPUTS: Final = 4
"""So many outputs of each sequence later it has got further: what an engine computed just before
it died may not have been delivered."""
MAX_DEATHS: Final = 10
"""So many engines may die without a sign of life of one request, in a step or not."""


class InFlightRequest:
    """A request, its output stream, and the blame for engines that died with it."""

    def __init__(
        self,
        request: EngineRequest,
        adapters: Sequence[AdapterSource],
        labels: Collection[Hashable] = (),
        *,
        submitted_ns: int = 0,
        batch: RequestBatch | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.arrival_ns = request.arrival_ns
        self.deadline_ns = request.deadline_ns
        self.adapters = tuple({source.digest: source for source in adapters}.values())
        self.stream = OutputStream()
        self.labels = labels
        self.submitted_ns = submitted_ns
        task = request.task
        self.is_search = isinstance(task, Generate) and task.sampling.beam is not None
        """Whether it searches with beams, whose output comes at its end."""
        self.batch = batch
        self.is_sent = False
        """Whether the running engine has received it."""
        self.has_waited = False
        """Whether it was accepted before the running engine was there."""
        self._request = request
        # Another server may have begun it: see serving.continuation.
        former = request.outputs or ((),) * request.task.num_returned
        self._outputs = [list(token_ids) for token_ids in former]
        self._ended = set(request.ended)
        self._aborted: set[int] = set()
        self._prompt_scores_delivered = request.prompt_scores_delivered
        self._timing: RequestTiming | None = None
        """Timing reported by engines that died."""
        self._reported: RequestTiming | None = None
        self._num_deaths = 0
        self._num_steps = 0
        self._place = 0
        """Number of steps that a beam search was in when an engine died."""
        self._behind: dict[int, int] = {}
        """Sequences at the place where an engine died, and how many outputs further that ends."""
        self.blame = 0
        """Blame for engines that died since it got further; see SUSPECT_BLAME."""
        self._deaths_here = 0

    @property
    def is_new(self) -> bool:
        """Whether no engine has received it yet."""
        return not self.is_sent and self._num_deaths == 0

    @property
    def waits_for_others(self) -> bool:
        """Whether more requests may follow that its client sent with it.

        It waits however long they take, since one may load an adapter for minutes: the client
        awaits all of them, and they are promised one plan.
        """
        return self.batch is not None and self.batch.is_open

    @property
    def num_output_tokens(self) -> int:
        """Delivered so far."""
        return sum(map(len, self._outputs))

    def engine_request(self) -> EngineRequest:
        """Return the request as an engine receives it, the first or a later one."""
        if self._num_deaths == 0:
            return self._request
        # A search keeps its beams to itself until it is over: it starts again.
        starts_again = self._request.task.is_search
        return msgspec.structs.replace(
            self._request,
            outputs=() if starts_again else tuple(map(tuple, self._outputs)),
            ended=tuple(sorted(self._ended)),
            prompt_scores_delivered=self._prompt_scores_delivered,
            requires_resident=False,
            num_restarts=self._num_deaths,
        )

    def deliver(self, output: EngineOutput) -> None:
        """Put what the engine said into the stream."""
        for delta in output.deltas:
            self._outputs[delta.index].extend(delta.token_ids)
            self._get_further(delta)
        if output.prompt_logprobs is not None or output.prompt_logits:
            self._prompt_scores_delivered = True
        if output.timing is not None:
            self._reported = output.timing
            output = msgspec.structs.replace(output, timing=self._whole_timing())
        self.stream.put(output)

    def note_step(self) -> None:
        """A step with a row of this search ended well. It shows no other sign of life."""
        self._num_steps += 1
        if self._num_steps > self._place + PLACE_OUTPUTS:
            self._clear()

    def abort(self, sequence_index: int | None) -> bool:
        """Note that it, or one sequence, is to end. False if that has ended or will end already."""
        every = set(range(len(self._outputs)))
        # A beam search has one output: engines end it as a whole, too.
        is_whole = sequence_index is None or self._request.task.is_search
        meant = every if is_whole else every & {sequence_index}
        new = meant - self._ended - self._aborted
        self._aborted |= new
        return bool(new)

    def end_aborted(self) -> bool:
        """Apply aborts without an engine; return whether the request ended with them."""
        ending = sorted(self._aborted - self._ended)
        if not ending:
            return False
        self._ended.update(ending)
        is_over = len(self._ended) == len(self._outputs)
        deltas = (SequenceDelta(index, finish_reason=FinishReason.ABORT) for index in ending)
        timing = self._whole_timing() if is_over else None
        self.stream.put(
            EngineOutput(self.request_id, tuple(deltas), finished=is_over, timing=timing)
        )
        return is_over

    def fail(self, error: LoraplexError) -> None:
        """The last output."""
        self.stream.put(
            EngineOutput(
                self.request_id, finished=True, error=error.to_info(), timing=self._whole_timing()
            )
        )

    def lose_engine(self, blame: int) -> None:
        """Note that the engine which had received it is dead."""
        self._timing, self._reported = self._whole_timing(), None
        self.is_sent = False
        self._num_deaths += 1
        self._deaths_here += 1
        self._place, self._num_steps = self._num_steps, 0
        alive = (index for index in range(len(self._outputs)) if index not in self._ended)
        self._behind = dict.fromkeys(alive, PLACE_OUTPUTS)
        self.blame += blame

    @property
    def is_guilty(self) -> bool:
        """Engines died at one place of it, again and again."""
        return self.blame >= MAX_BLAME

    @property
    def is_stuck(self) -> bool:
        """Engines died and it got nowhere, though it may have done nothing."""
        return self._deaths_here >= MAX_DEATHS

    def _get_further(self, delta: SequenceDelta) -> None:
        index = delta.index
        num_left = self._behind.pop(index, 1) - 1
        if delta.finish_reason is not None:
            self._ended.add(index)
        elif num_left:
            self._behind[index] = num_left
        if not self._behind:
            self._clear()

    def _clear(self) -> None:
        """It got beyond the place where an engine had died."""
        self.blame = self._deaths_here = 0

    def _whole_timing(self) -> RequestTiming:
        """Return the timing since arrival, as far as any engine reported it."""
        reported = self._reported or RequestTiming(
            self._request.arrival_ns, num_restarts=self._num_deaths
        )
        return reported if self._timing is None else reported.since(self._timing)
