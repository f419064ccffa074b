"""Messages in frames, however the stream is cut."""

import msgspec
import pytest

from loraplex.serving.remote.frames import FrameConnection


class Text(msgspec.Struct):
    text: str


def framed(*texts):
    bodies = [msgspec.msgpack.encode(Text(text)) for text in texts]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_a_stream_that_is_cut_anywhere(size):
    received = []
    decoder = msgspec.msgpack.Decoder(Text)
    connection = FrameConnection(decoder, received.append, lambda: None)
    texts = ["", "a", "b" * 300, "c"]
    data = framed(*texts)
    for start in range(0, len(data), size):
        connection.data_received(data[start : start + size])
    assert [message.text for message in received] == texts


async def test_what_is_sent_after_the_end_is_lost():
    connection = FrameConnection(msgspec.msgpack.Decoder(Text), print, lambda: None)
    connection.send(Text("a"))
    connection.close()
