import gzip
import json
import re
import zlib

import numpy as np
import pytest

from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    InvalidTensorError,
    PayloadTooLargeError,
    RequestError,
)
from loraplex.frontends.kserve.http.body import (
    compress,
    decode_request,
    decompress,
    encode_response,
    parse_object,
)
from loraplex.frontends.kserve.messages import InferResponse
from loraplex.frontends.kserve.shared_memory import SharedMemory, TenantMemory
from loraplex.frontends.kserve.tensors import numbers, strings
from support.naming import naming, refused

MEMORY = TenantMemory(SharedMemory(), "default")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "k").write_bytes(bytes(8) + b"\0\0\0\0\x05\0\0\0" + bytes(4))
    return tmp_path


@pytest.fixture
def memory(folder):
    regions = SharedMemory(folder)
    regions.register("t", "r", "/k", 8, 8)
    yield TenantMemory(regions, "t")
    regions.close()


def entry(name="x", shape=(1,), datatype="INT32", **more):
    return {"name": name, "shape": list(shape), "datatype": datatype, **more}


def decode(document, blob=b"", header=True):
    body = json.dumps(document).encode()
    length = str(len(body)) if header else None
    return decode_request(body + blob, length, model="m", version="", memory=MEMORY)


def test_json_and_binary_inputs_side_by_side():
    document = {
        "id": "7",
        "parameters": {"timeout": 5},
        "inputs": [
            entry("a", parameters={"binary_data_size": 4}),
            entry("b", data=[5]),
            entry("c", datatype="BYTES", parameters={"binary_data_size": 6}),
        ],
    }
    request, _ = decode(document, b"\x01\0\0\0\x02\0\0\0hi")
    assert {t.name: t.array.tolist() for t in request.inputs} == {"a": [1], "b": [5], "c": [b"hi"]}
    assert (request.request_id, request.parameters) == ("7", {"timeout": 5})


@pytest.mark.parametrize(
    ("document", "blob", "named"),
    [
        ({}, b"", ("non-existing object member 'inputs'",)),  # Triton's text.
        ({"inputs": {}}, b"", ("inputs",)),
        ({"inputs": [{"shape": [1]}]}, b"", ("name",)),
        ({"inputs": [entry()]}, b"", ("x", "data", "binary_data_size")),
        ({"inputs": [{"name": "x", "datatype": "INT32", "data": [1]}]}, b"", ("shape", "x")),
        ({"inputs": [{"name": "x", "shape": [1], "data": [1]}]}, b"", ("x", "None")),
        ({"inputs": []}, b"abcd", (4, "JSON", "inputs", "binary_data_size")),
        ({"inputs": [entry(parameters={"binary_data_size": 4})]}, b"", (0, "binary_data_size", 4)),
        (
            {"inputs": [entry(parameters={"binary_data_size": "4"})]},
            b"1234",
            (4, "binary_data_size"),
        ),
        (
            {"inputs": [entry(parameters={"binary_data_size": -1})]},
            b"1234",
            (-1, "binary_data_size"),
        ),
        ({"inputs": [entry(parameters=[])]}, b"", ("parameters", "x", "JSON")),
        ({"inputs": [], "id": 7}, b"", ("id",)),
        ({"inputs": [], "outputs": [1]}, b"", ("outputs",)),
        ({"inputs": [], "parameters": {"p": []}}, b"", ("p",)),
    ],
)
def test_bad_documents(document, blob, named):
    with pytest.raises((InvalidRequestError, InvalidTensorError)) as raised:
        decode(document, blob)
    assert re.search(naming(*named), raised.value.message)


@pytest.mark.parametrize("length", ["0", "-1", "99", "x", ""])
def test_a_bad_header_length(length):
    with pytest.raises(
        InvalidRequestError,
        match=naming("Inference-Header-Content-Length", repr(length), "[1, 14]"),
    ):
        decode_request(b'{"inputs": []}', length, model="m", version="", memory=MEMORY)


def region(**more):
    return {"shared_memory_region": "r", "shared_memory_byte_size": 4, **more}


def test_an_input_in_shared_memory(memory):
    document = {
        "inputs": [
            entry("a", parameters=region(shared_memory_offset=4)),
            entry("b", parameters={"binary_data_size": 4}),
        ]
    }
    body = json.dumps(document).encode()
    request, _ = decode_request(
        body + b"\x07\0\0\0", str(len(body)), model="m", version="", memory=memory
    )
    assert {t.name: t.array.tolist() for t in request.inputs} == {"a": [5], "b": [7]}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"shared_memory_region": 5}, (5, "shared_memory_region")),
        ({"shared_memory_region": "r"}, ("shared_memory_byte_size",)),
        (region(shared_memory_byte_size=-4), (-4, "shared_memory_byte_size")),
        (region(shared_memory_offset="0"), (0, "shared_memory_offset")),
        (region(shared_memory_byte_size=2**63), (9223372036854775808, "shared_memory_byte_size")),
        (
            region(shared_memory_byte_size=8),
            ("byte size mismatch for input 'x'. Expected 4",),
        ),  # Triton's text.
        (
            region(shared_memory_offset=8),
            ("Invalid offset + byte size for shared memory region",),
        ),  # Triton's text.
        (
            region(shared_memory_offset=9),
            ("Invalid offset for shared memory region: 'r'",),
        ),  # Triton's text.
        (
            region(shared_memory_region="q"),
            ("Unable to find shared memory region: 'q'",),
        ),  # Triton's text.
    ],
)
def test_a_bad_place_of_an_input(memory, parameters, named):
    body = json.dumps({"inputs": [entry(parameters=parameters)]}).encode()
    with pytest.raises(RequestError, match=naming(*named)):
        decode_request(body, None, model="m", version="", memory=memory)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"classification": -1}, ("classification", "y", -1)),
        ({"classification": True}, ("classification", "y", "True")),
        (region(classification=1), ("shared_memory_region", "classification")),
        (region(shared_memory_byte_size=9), ("Invalid offset + byte size",)),  # Triton's text.
        (
            region(shared_memory_region="q"),
            ("Unable to find shared memory region: 'q'",),
        ),  # Triton's text.
    ],
)
def test_a_bad_wish_for_an_output(memory, parameters, named):
    document = {"inputs": [], "outputs": [{"name": "y", "parameters": parameters}]}
    with pytest.raises(RequestError, match=naming(*named)):
        decode_request(json.dumps(document).encode(), None, model="m", version="", memory=memory)


RESPONSE = InferResponse(
    model="m",
    version="1",
    request_id="7",
    outputs=(strings("s", ["é"]), numbers("n", "INT32", [[1, 2]])),
)


def response(document):
    _, wish = decode({"inputs": [], **document})
    pieces, json_length = encode_response(RESPONSE, wish)
    body = b"".join(pieces)
    split = len(body) if json_length is None else json_length
    return json.loads(body[:split]), body[split:], json_length


def test_outputs_are_json_by_default():
    document, blob, json_length = response({})
    assert (blob, json_length) == (b"", None)
    assert document == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "s", "datatype": "BYTES", "shape": [1], "data": ["é"]},
            {"name": "n", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
        ],
    }


def test_binary_outputs_in_order():
    document, blob, _ = response({"parameters": {"binary_data_output": True}})
    sizes = [row["parameters"]["binary_data_size"] for row in document["outputs"]]
    assert sizes == [6, 8]
    assert blob == b"\x02\0\0\0" + "é".encode() + np.array([1, 2], dtype="<i4").tobytes()


def test_a_wish_for_one_output_is_stronger():
    wish = [{"name": "s", "parameters": {"binary_data": False}}, {"name": "n"}]
    document, blob, _ = response({"parameters": {"binary_data_output": True}, "outputs": wish})
    assert document["outputs"][0]["data"] == ["é"]
    assert len(blob) == 8


@pytest.mark.parametrize("value", ["false", "true", 0, 1, 1.0, None, []])
def test_a_wish_for_binary_data_is_a_boolean(value):
    wish = [{"name": "s", "parameters": {"binary_data": value}}]
    with refused(InvalidParameterError, "'binary_data'", "'s'", repr(value), param="binary_data"):
        response({"outputs": wish})
    name = "binary_data_output"
    with refused(InvalidParameterError, repr(name), repr(value), param=name):
        response({"parameters": {"binary_data_output": value}})


def test_outputs_go_to_shared_memory_and_into_classes(memory, folder):
    wanted = [
        {"name": "s", "parameters": region(shared_memory_byte_size=8)},
        {"name": "n", "parameters": {"classification": 1}},
    ]
    body = json.dumps({"inputs": [], "outputs": wanted}).encode()
    _, wishes = decode_request(body, None, model="m", version="", memory=memory)
    pieces, json_length = encode_response(RESPONSE, wishes)
    responded = b"".join(pieces)
    assert json_length is None
    assert json.loads(responded)["outputs"] == [
        {"name": "s", "datatype": "BYTES", "shape": [1]},
        {"name": "n", "datatype": "BYTES", "shape": [1, 1], "data": ["2:1"]},
    ]
    assert (folder / "k").read_bytes()[8:14] == b"\x02\0\0\0" + "é".encode()


def test_a_region_that_is_too_small(memory):
    wanted = [{"name": "s", "parameters": region()}]
    body = json.dumps({"inputs": [], "outputs": wanted}).encode()
    _, wishes = decode_request(body, None, model="m", version="", memory=memory)
    # Triton's text.
    with pytest.raises(InvalidRequestError, match=r"'s' \(4 bytes\) should be at least 6 bytes"):
        encode_response(RESPONSE, wishes)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compression(encoding, pack):
    data = b"x" * 1000
    assert decompress(pack(data), encoding.upper(), 1000) == data
    with pytest.raises(PayloadTooLargeError):
        decompress(pack(data), encoding, 999)
    with pytest.raises(InvalidRequestError, match=naming(encoding, "early")):
        decompress(pack(data)[:-3], encoding, 1000)
    with pytest.raises(InvalidRequestError, match=naming(encoding)):
        decompress(b"nonsense", encoding, 1000)
    pieces, headers = compress([data[:5], data[5:]], f"br, {encoding};q=0.5")
    packed = b"".join(pieces)
    assert headers == {"Content-Encoding": encoding}
    assert decompress(packed, encoding, 1000) == data


def test_gzip_data_of_several_members():
    members = gzip.compress(b"x" * 600) + gzip.compress(b"") + gzip.compress(b"y" * 400)
    assert decompress(members, "gzip", 1000) == b"x" * 600 + b"y" * 400
    with pytest.raises(PayloadTooLargeError):
        decompress(members, "gzip", 999)
    with pytest.raises(InvalidRequestError, match=naming("gzip", "early")):
        decompress(members[:-3], "gzip", 1000)


def test_gzip_data_of_more_than_one_chunk():
    data = np.random.default_rng(0).bytes(300_000)
    packed = gzip.compress(data)
    assert decompress(packed * 2, "gzip", 600_000) == data * 2
    with pytest.raises(PayloadTooLargeError):
        decompress(packed, "gzip", 299_999)


def test_members_without_end_are_refused_before_they_cost_anything():
    with refused(InvalidRequestError, "gzip", 200000):
        decompress(gzip.compress(b"") * 20_000, "gzip", 1_000_000)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_junk_behind_compressed_data(encoding, pack):
    with pytest.raises(InvalidRequestError, match=naming(encoding)):
        decompress(pack(b"x") + b"junk", encoding, 1000)


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        ("gzip;q=0.000", None),
        ("gzip;q=0.", None),
        ("gzip; q=0.000, deflate ; q=0.001", "deflate"),
        ("gzip;q=0.2, deflate;q=0.8", "deflate"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, identity", None),
        ("identity;q=0.5, GZIP;Q=0.7", "gzip"),
        ("gzip, identity", "gzip"),
        ("identity;q=0, *", "gzip"),
        ("*", None),
        ("*;q=0", None),
        ("gzip;q=0, *;q=0.5", None),
        ("gzip;q=high, gzip;q=nan", None),
        ("gzip;q=2", None),
        ("gzip;level=9", None),
        ("br", None),
        (",", None),
    ],
)
def test_the_encoding_that_the_client_likes_best(accepted, chosen):
    _, headers = compress([b"x"], accepted)
    assert headers.get("Content-Encoding") == chosen


def test_no_compression():
    assert decompress(b"x", "identity", 10) == b"x"
    assert compress([b"x"], "gzip;q=0, br") == ([b"x"], {})
    # Triton's text.
    with pytest.raises(InvalidRequestError, match="Unsupported content-encoding 'br'"):
        decompress(b"x", "br", 10)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b'{"a": \xff}', b"[" * 100_000])
def test_bodies_that_are_no_object(body):
    with pytest.raises(InvalidRequestError, match="JSON"):
        parse_object(body)


def test_nothing_is_the_empty_object():
    assert parse_object(b"  \n") == {}
