import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from loraplex.core.output import RequestOutput, SequenceOutput
from loraplex.frontends.openai.sse import ChunkStream, output_work
from loraplex.frontends.streams import IndexedOutput


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
