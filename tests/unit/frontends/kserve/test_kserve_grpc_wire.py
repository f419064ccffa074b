"""Messages are bounded on the wire, before protobuf makes objects of them."""

import pytest
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import InvalidRequestError, PayloadTooLargeError
from loraplex.frontends.kserve.grpc import wire
from loraplex.frontends.kserve.grpc.codec import infer_reader
from loraplex.frontends.kserve.grpc.wire import MAX_FIELDS, MAX_PARSED_BYTES, MessageReader
from support.naming import naming, refused

READER = infer_reader(max_values=1000)


def read(message):
    return READER.read_now(message.SerializeToString())


def with_input(**contents):
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="INT32", shape=[1], contents=contents)
    return message


@pytest.fixture
def unparsed(monkeypatch):
    """A reader that may not parse."""
    reader = infer_reader(max_values=1000)
    monkeypatch.setattr(reader, "_parse", None)
    return reader


def test_raw_contents_are_not_copied():
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"one", b"", b"two"])
    message.inputs.add(name="x")
    data = message.SerializeToString() + pb.ModelInferRequest(id="7").SerializeToString()
    parsed, raw = READER.read_now(data)
    assert [bytes(each) for each in raw] == [b"one", b"", b"two"]
    assert all(each.obj is data for each in raw)
    assert not parsed.raw_input_contents
    assert (parsed.model_name, parsed.inputs[0].name, parsed.id) == ("m", "x", "7")


@pytest.mark.parametrize(
    "field",
    [
        b"\x2a\x00",  # inputs
        b"\x32\x00",  # outputs
        b"\x22\x00",  # parameters
        b"\x3a\x00",  # raw_input_contents
        b"\x7a\x00",  # an unknown field
    ],
)
def test_many_fields(unparsed, field):
    with refused(PayloadTooLargeError, 16384, "raw_input_contents"):
        unparsed.read_now(field * (MAX_FIELDS + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes_contents", b""), ("bytes_contents", b"x")],
)
def test_many_fields_of_parts(unparsed, field, value):
    message = with_input(**{field: [value] * MAX_FIELDS})
    with refused(PayloadTooLargeError, 16384, "raw_input_contents"):
        unparsed.read_now(message.SerializeToString())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bool_contents", True),
        ("int_contents", -1),
        ("int64_contents", 300),
        ("uint_contents", 1),
        ("uint64_contents", 2**64 - 1),
        ("fp32_contents", 0.5),
        ("fp64_contents", 0.5),
    ],
)
def test_many_numbers(unparsed, field, value):
    contents = read(with_input(**{field: [value] * 999})).message.inputs[0].contents
    assert len(getattr(contents, field)) == 999
    for count in (1001, 100_000):
        data = with_input(**{field: [value] * count}).SerializeToString()
        with refused(PayloadTooLargeError, 1000, "max_request_values"):
            unparsed.read_now(data)


def test_many_dimensions(unparsed):
    message = pb.ModelInferRequest()
    message.inputs.add(shape=[1] * 1001)
    with pytest.raises(PayloadTooLargeError):
        unparsed.read_now(message.SerializeToString())


def test_large_contents_are_raw(unparsed, monkeypatch):
    monkeypatch.setattr(wire, "MAX_PARSED_BYTES", 1000)
    data = with_input(bytes_contents=[bytes(1000)]).SerializeToString()
    with refused(PayloadTooLargeError, 1025, 1000, "raw_input_contents"):
        unparsed.read_now(data)
    raw = pb.ModelInferRequest(raw_input_contents=[bytes(10_000)]).SerializeToString()
    assert len(READER.read_now(raw).raw[0]) == 10_000
    assert MAX_PARSED_BYTES > 1 << 20


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\x0a\x05m", ("early",)),
        (b"\x2a", ("early",)),
        (b"\x2a\x02\x0a\x05mmmmm", ("early",)),
        (b"\x80" * 11, ("varint",)),
        (b"\x0b\x0c", ("wire type 3",)),
        (b"\x0a\x01\xff", ("Error parsing message",)),  # protobuf's text.
    ],
)
def test_other_bytes(data, named):
    with pytest.raises(InvalidRequestError, match=naming(*named)):
        READER.read_now(data)


async def test_a_long_message_is_read_in_a_thread():
    data = with_input(bytes_contents=[bytes(100_000)]).SerializeToString()
    assert (await READER.read(data)).message.model_name == "m"


def test_other_messages_are_bounded():
    reader = MessageReader(pb.RepositoryModelLoadRequest, 1000)
    load = pb.RepositoryModelLoadRequest(model_name="m")
    load.parameters["config"].string_param = "{}"
    assert reader.read_now(load.SerializeToString()).message == load
    with pytest.raises(PayloadTooLargeError):
        reader.read_now(b"\x1a\x00" * (MAX_FIELDS + 1))
