import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from loraplex.core.errors import InternalError
from loraplex.core.output import EngineOutput, RequestOutput, SequenceDelta, SequenceOutput
from loraplex.frontends.direct_writes import DIRECT
from loraplex.frontends.openai.sse import ChunkStream, output_work
from loraplex.frontends.streams import IndexedOutput
from loraplex.serving.engines.in_flight_request import OutputStream
from support.skipping_loop import settle


class Chunk(msgspec.Struct):
    num_characters: int


class Writer:
    """Writes how long the text is, and notes in which thread."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return {}

    def chunks(self, output: IndexedOutput) -> Iterator[Chunk]:
        self.threads.append(threading.current_thread())
        [sequence] = output[1].sequences
        yield Chunk(len(sequence.text))

    def last_chunks(self) -> Iterator[Chunk]:
        yield Chunk(-1)


async def outputs(*texts: str) -> AsyncGenerator[IndexedOutput, None]:
    for text in texts:
        sequence = SequenceOutput(0, text, (), (), None)
        yield 0, RequestOutput(1, "1", "m", (), (), (sequence,), 1, finished=False)


async def events(writer: Writer, *texts: str, **options: Any) -> list[bytes]:
    sent = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    stream = ChunkStream(outputs(*texts), writer, "id", **options)
    await stream({"type": "http"}, receive, send)
    return [message["body"] for message in sent[1:] if message["body"]]


@pytest.mark.parametrize("options", [{}, {"work_of": output_work}])
async def test_events_come_in_order(options: dict[str, Any]) -> None:
    lengths = (1, 5000, 2, 60_000)
    written = await events(Writer(), *["x" * length for length in lengths], **options)
    assert written == [
        *(b'data: {"num_characters":%d}\n\n' % length for length in lengths),
        b'data: {"num_characters":-1}\n\ndata: [DONE]\n\n',
    ]


async def test_what_is_long_is_read_beside_the_loop() -> None:
    writer = Writer()
    await events(writer, "x", "x" * 5000, "x", work_of=output_work)
    here = threading.current_thread()
    assert [thread is here for thread in writer.threads] == [True, False, True]


class Connection:
    """A DirectWriter, and the `send` of an application."""

    def __init__(self) -> None:
        self.is_writable = True
        self.direct: list[bytes] = []
        self.sent: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.direct.append(data)

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b""))


class Outputs(AsyncIterator[IndexedOutput]):
    """Outputs of a request that are ready as soon as they come."""

    def __init__(self) -> None:
        self.stream = OutputStream()

    def put(self, *texts: str) -> None:
        for text in texts:
            self.stream.put(EngineOutput(1, (SequenceDelta(0, tuple(map(ord, text))),)))

    async def __anext__(self) -> IndexedOutput:
        return self._output(await self.stream.take())

    async def aclose(self) -> None:
        self.stream.leave()

    def when_ready(self, read: Callable[[], bool]) -> None:
        self.stream.when_ready(read)

    def take_ready(self) -> IndexedOutput | None:
        return self._output(self.stream.take_pending())

    def _output(self, outputs: list[EngineOutput]) -> IndexedOutput:
        ids = [token_id for output in outputs for token_id in output.deltas[0].token_ids]
        if 0 in ids:
            raise StopAsyncIteration
        text = "".join(map(chr, ids))
        if "!" in text:
            raise InternalError("wrong")
        sequence = SequenceOutput(0, text, (), (), None)
        return 0, RequestOutput(1, "1", "m", (), (), (sequence,), len(ids), finished=False)


@contextlib.asynccontextmanager
async def streaming(
    connection: Connection, outputs: Outputs
) -> AsyncIterator["asyncio.Task[None]"]:
    async def receive() -> Any:
        await asyncio.Event().wait()

    stream = ChunkStream(outputs, Writer(), "id", ready=outputs)
    task = asyncio.create_task(
        stream({"type": "http", DIRECT: connection}, receive, connection.send)
    )
    await settle()
    try:
        yield task
    finally:
        outputs.put("\0")
        await task


def lengths(*numbers: int) -> list[bytes]:
    return [b'data: {"num_characters":%d}\n\n' % number for number in numbers]


async def test_what_comes_later_is_written_without_the_task() -> None:
    connection, outputs = Connection(), Outputs()
    async with streaming(connection, outputs):
        outputs.put("first")
        await settle()
        outputs.put("ab", "c")
        assert connection.direct == lengths(2, 1)
        assert connection.sent == [b"", *lengths(5)]
    assert connection.direct == lengths(2, 1)


async def test_a_task_waits_for_a_client_that_does_not_read() -> None:
    connection, outputs = Connection(), Outputs()
    async with streaming(connection, outputs):
        outputs.put("first")
        await settle()
        connection.is_writable = False
        outputs.put("ab", "c")
        assert connection.direct == []
        connection.is_writable = True
        outputs.put("d")  # the task has been woken: the order is kept
        await settle()
        assert connection.sent == [b"", *lengths(5, 4)]
        outputs.put("ef")
        assert connection.direct == lengths(2)


async def test_an_error_without_the_task_is_the_tasks() -> None:
    connection, outputs = Connection(), Outputs()
    async with streaming(connection, outputs):
        outputs.put("first")
        await settle()
        outputs.put("!")
        await settle()
        assert b"wrong" in connection.sent[-2]
        outputs.put("a")
        assert connection.direct == []
