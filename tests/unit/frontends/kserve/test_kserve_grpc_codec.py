import re

import pytest
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.grpc.codec import (
    decode_request,
    encode_failure,
    encode_piece,
    encode_response,
    infer_reader,
)
from loraplex.frontends.kserve.messages import InferResponse
from loraplex.frontends.kserve.outputs import Wishes
from loraplex.frontends.kserve.shared_memory import SharedMemory, TenantMemory
from loraplex.frontends.kserve.tensors import numbers, strings
from support.naming import naming, refused

MEMORY = TenantMemory(SharedMemory(), "default")
READER = infer_reader(max_values=1000)


def decode(request, memory=MEMORY):
    return decode_request(*READER.read_now(request.SerializeToString()), memory)


def message(*inputs, raw=(), **more):
    request = pb.ModelInferRequest(model_name="m", id="7", **more)
    for name, datatype, contents in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=[1], contents=contents)
    request.raw_input_contents.extend(raw)
    return request


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("BOOL", "bool_contents", True),
        ("UINT8", "uint_contents", 255),
        ("UINT64", "uint64_contents", 2**64 - 1),
        ("INT16", "int_contents", -5),
        ("INT64", "int64_contents", -(2**63)),
        ("FP32", "fp32_contents", 0.5),
        ("FP64", "fp64_contents", 0.1),
        ("BYTES", "bytes_contents", b"\xff"),
    ],
)
def test_typed_contents(datatype, field, value):
    request, _ = decode(message(("x", datatype, {field: [value]})))
    assert request.inputs[0].array.tolist() == [value]


def test_raw_contents():
    request, _ = decode(message(("x", "INT32", None), raw=[b"\x05\0\0\0"]))
    assert request.inputs[0].array.tolist() == [5]
    assert (request.model, request.request_id) == ("m", "7")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (message(("x", "INT32", None), raw=[b"", b""]), ("raw_input_contents", 1, 2)),
        (
            message(("x", "INT32", {"int_contents": [1]}), raw=[b"1234"]),
            ("raw_input_contents", "x"),
        ),
        (message(("x", "FP16", {"fp32_contents": [1]})), ("raw_input_contents", "x", "FP16")),
        (
            message(("x", "INT64", {"int_contents": [1]})),
            ("int64_contents", "int_contents", "x", "INT64"),
        ),
        (message(("x", "UINT8", {"uint_contents": [256]})), ("[0, 255]", "x", 256, "UINT8")),
        (message(("x", "INT32", {})), (0, "[1]", 1, "x")),
        (message(("x", "", {})), ("x", "''")),
    ],
)
def test_bad_messages(bad, named):
    with pytest.raises((InvalidRequestError, InvalidTensorError)) as raised:
        decode(bad)
    assert re.search(naming(*named), raised.value.message)


def test_parameters_and_requested_outputs():
    request = message(outputs=[{"name": "a"}, {"name": "b"}])
    request.parameters["i"].int64_param = 5
    request.parameters["b"].bool_param = False
    request.parameters["s"].string_param = "x"
    request.parameters["d"].double_param = 0.5
    request.parameters["nothing"].SetInParent()
    decoded, _ = decode(request)
    assert decoded.parameters == {"i": 5, "b": False, "s": "x", "d": 0.5}
    assert decoded.requested == ("a", "b")


RESPONSE = InferResponse(
    model="m",
    version="1",
    request_id="7",
    outputs=(strings("s", ["é"]), numbers("n", "INT32", [[1, 2]])),
    parameters={"i": 1, "b": True, "d": 0.5, "s": "x"},
    is_final=False,
)


def test_responses_are_raw():
    encoded = encode_response(RESPONSE, Wishes(MEMORY))
    assert [(o.name, o.datatype, list(o.shape)) for o in encoded.outputs] == [
        ("s", "BYTES", [1]),
        ("n", "INT32", [1, 2]),
    ]
    assert encoded.raw_output_contents[0] == b"\x02\0\0\0" + "é".encode()
    assert encoded.parameters["b"].bool_param is True
    assert encoded.parameters["i"].int64_param == 1


def test_pieces_say_whether_they_are_the_last():
    piece = encode_piece(RESPONSE, Wishes(MEMORY)).infer_response
    assert piece.parameters["triton_final_response"].WhichOneof("parameter_choice") == "bool_param"
    assert piece.parameters["triton_final_response"].bool_param is False
    failure = encode_failure(message(), "broken")
    assert failure.error_message == "broken"
    assert failure.infer_response.id == "7"
    assert failure.infer_response.parameters["triton_final_response"].bool_param is True


def in_region(parameters, byte_size, offset=0):
    parameters["shared_memory_region"].string_param = "r"
    parameters["shared_memory_byte_size"].int64_param = byte_size
    parameters["shared_memory_offset"].int64_param = offset


def test_shared_memory_beside_raw_contents(tmp_path):
    (tmp_path / "k").write_bytes(b"\x05\0\0\0" + bytes(12))
    regions = SharedMemory(tmp_path)
    regions.register("t", "r", "k", 0, 16)
    memory = TenantMemory(regions, "t")
    request = message(("x", "INT32", None), ("y", "INT32", None), raw=[b"\x07\0\0\0"])
    in_region(request.inputs[0].parameters, 4)
    in_region(request.outputs.add(name="n").parameters, 8, 8)
    decoded, wishes = decode(request, memory)
    assert [tensor.array.tolist() for tensor in decoded.inputs] == [[5], [7]]
    encoded = encode_response(RESPONSE, wishes)
    assert list(encoded.raw_output_contents) == [b"\x02\0\0\0" + "é".encode(), b""]
    assert (tmp_path / "k").read_bytes()[8:] == b"\x01\0\0\0\x02\0\0\0"
    request.raw_input_contents.append(b"")
    with refused(InvalidRequestError, "raw_input_contents", 1, 2, param="raw_input_contents"):
        decode(request, memory)
    regions.close()
