"""Conversion of parsed output to the items of a response, and their events.

One item is open at a time: reasoning, then content and calls in the order in which the model wrote
them. However an output is split into chunks, its items are the same.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from loraplex.core.tools import CallDelta
from loraplex.frontends.long_json import LongList
from loraplex.frontends.openai.responses import ContentLogprob
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.input_items import new_id
from loraplex.serving.text.chat_format import CompletionDelta

Number = Callable[[], int]
"""The next sequence_number."""


class _Reasoning:
    def __init__(self, number: Number, output_index: int) -> None:
        self._number = number
        self._index = output_index
        self._id = new_id("rs")
        self._pieces: list[str] = []

    def item(self, status: wire.Status) -> wire.ReasoningItem:
        return wire.ReasoningItem(
            id=self._id, status=status, content=[wire.ReasoningText(text="".join(self._pieces))]
        )

    def begin(self) -> Iterator[wire.Event]:
        item = wire.ReasoningItem(id=self._id, status="in_progress", content=[])
        yield wire.ItemAdded(sequence_number=self._number(), output_index=self._index, item=item)
        yield wire.PartAdded(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            part=wire.ReasoningText(text=""),
        )

    def add(self, text: str) -> wire.Event:
        self._pieces.append(text)
        return wire.ReasoningDelta(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            delta=text,
        )

    def end(self, status: wire.Status) -> Iterator[wire.Event]:
        yield wire.ReasoningDone(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            text="".join(self._pieces),
        )
        yield wire.PartDone(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            part=wire.ReasoningText(text="".join(self._pieces)),
        )
        yield wire.ItemDone(
            sequence_number=self._number(), output_index=self._index, item=self.item(status)
        )


class _Message:
    def __init__(self, number: Number, output_index: int) -> None:
        self._number = number
        self._index = output_index
        self._id = new_id("msg")
        self._pieces: list[str] = []
        self._logprobs: list[ContentLogprob] = []

    @property
    def _part(self) -> wire.OutputText:
        return wire.OutputText(text="".join(self._pieces), logprobs=LongList(self._logprobs))

    def item(self, status: wire.Status) -> wire.MessageItem:
        return wire.MessageItem(id=self._id, status=status, content=[self._part])

    def begin(self) -> Iterator[wire.Event]:
        item = wire.MessageItem(id=self._id, status="in_progress", content=[])
        yield wire.ItemAdded(sequence_number=self._number(), output_index=self._index, item=item)
        yield wire.PartAdded(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            part=wire.OutputText(text=""),
        )

    def add(self, text: str, logprobs: Sequence[ContentLogprob]) -> wire.Event:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return wire.TextDelta(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            delta=text,
            logprobs=LongList(logprobs),
        )

    def end(self, status: wire.Status) -> Iterator[wire.Event]:
        yield wire.TextDone(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            text="".join(self._pieces),
            logprobs=LongList(self._logprobs),
        )
        yield wire.PartDone(
            sequence_number=self._number(),
            output_index=self._index,
            item_id=self._id,
            part=self._part,
        )
        yield wire.ItemDone(
            sequence_number=self._number(), output_index=self._index, item=self.item(status)
        )


class _CallItem:
    def __init__(self, number: Number, output_index: int, first: CallDelta) -> None:
        self.index = first.index
        """Index of the call among those of its message."""
        self._number = number
        self._output_index = output_index
        self._id = new_id("fc")
        self._call_id = first.call_id or ""
        self._name = first.name or ""
        self._pieces: list[str] = []

    def item(self, status: wire.Status) -> wire.CallItem:
        return wire.CallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments="".join(self._pieces),
        )

    def begin(self) -> Iterator[wire.Event]:
        yield wire.ItemAdded(
            sequence_number=self._number(),
            output_index=self._output_index,
            item=self.item("in_progress"),
        )

    def add(self, arguments: str) -> wire.Event:
        self._pieces.append(arguments)
        return wire.ArgumentsDelta(
            sequence_number=self._number(),
            output_index=self._output_index,
            item_id=self._id,
            delta=arguments,
        )

    def end(self, status: wire.Status) -> Iterator[wire.Event]:
        yield wire.ArgumentsDone(
            sequence_number=self._number(),
            output_index=self._output_index,
            item_id=self._id,
            name=self._name,
            arguments="".join(self._pieces),
        )
        yield wire.ItemDone(
            sequence_number=self._number(),
            output_index=self._output_index,
            item=self.item(status),
        )


_OpenItem = _Reasoning | _Message | _CallItem
_OpenT = TypeVar("_OpenT", _Reasoning, _Message, _CallItem)


class OutputItems:
    """The items of one response."""

    def __init__(self, number: Number) -> None:
        self._done: list[wire.OutputItem] = []
        self._number = number
        self._open: _OpenItem | None = None

    @property
    def has_begun(self) -> bool:
        """Whether content or a call has begun: the reasoning is over."""
        return isinstance(self._open, _Message | _CallItem)

    def so_far(self) -> list[wire.OutputItem]:
        """Items so far, including the open one."""
        unfinished = [] if self._open is None else [self._open.item("incomplete")]
        return [*self._done, *unfinished]

    def add(
        self, delta: CompletionDelta, logprobs: Sequence[ContentLogprob] = ()
    ) -> Iterator[wire.Event]:
        """The events of some more text. logprobs: of its content."""
        if delta.reasoning:
            thought = self._open
            if not isinstance(thought, _Reasoning):
                thought = yield from self._begin(_Reasoning(self._number, len(self._done)))
            yield thought.add(delta.reasoning)
        for part in delta.parts:
            if isinstance(part, CallDelta):
                yield from self._add_call(part)
            else:
                message = self._open
                if not isinstance(message, _Message):
                    message = yield from self._begin_message()
                yield message.add(part, logprobs)
                logprobs = ()

    def add_end(self, logprobs: Sequence[ContentLogprob]) -> Iterator[wire.Event]:
        """Add the log probability of the token that ended the output: the message has it, unless
        the output ended with reasoning or a call."""
        if self._open is None:
            yield from self._begin_message()
        if isinstance(self._open, _Message):
            yield self._open.add("", logprobs)

    def end(self, status: wire.Status) -> Iterator[wire.Event]:
        """Nothing follows; a response without any item gets an empty message."""
        if self._open is None:
            yield from self._begin_message()
        yield from self._close(status)

    def _add_call(self, part: CallDelta) -> Iterator[wire.Event]:
        call = self._open
        if not isinstance(call, _CallItem) or call.index != part.index:
            yield from self._close("completed")
            call = yield from self._begin(_CallItem(self._number, len(self._done), part))
        if part.arguments:
            yield call.add(part.arguments)

    def _begin_message(self) -> Generator[wire.Event, None, _Message]:
        yield from self._close("completed")
        return (yield from self._begin(_Message(self._number, len(self._done))))

    def _begin(self, item: _OpenT) -> Generator[wire.Event, None, _OpenT]:
        self._open = item
        yield from item.begin()
        return item

    def _close(self, status: wire.Status) -> Iterator[wire.Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._done.append(self._open.item(status))
            self._open = None
