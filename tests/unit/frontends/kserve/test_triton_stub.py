"""The model that runs inside Triton, with a double of its Python backend."""

import ast
import ctypes
import importlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from loraplex.frontends.kserve import stub
from loraplex.frontends.kserve.models.kinds import ENSEMBLE
from loraplex.frontends.kserve.models.triton_model import tensor_config
from loraplex.frontends.kserve.stub.tensors import TensorSpecs, from_wire
from loraplex.frontends.kserve.stub.wire import Response, WireTensor
from support import fake_triton_backend as fake
from support.echo_service import EchoService
from support.eventually import eventually
from support.fake_triton_backend import Request, Tensor, texts
from support.naming import naming
from support.served_socket import served_socket

STUB_FILES = sorted(Path(stub.__file__).parent.glob("*.py"))


@pytest.fixture
def backend():
    return EchoService()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "socket")


@pytest.fixture
def model_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    module = importlib.import_module("loraplex.frontends.kserve.stub.model")
    yield module.TritonPythonModel
    del sys.modules["loraplex.frontends.kserve.stub.model"]


def arguments(path, *, decoupled=True, name="ensemble", outputs=None, **parameters):
    declared = tensor_config(ENSEMBLE)
    config = {
        "max_batch_size": 8,
        "input": declared["input"],
        "output": [row for row in declared["output"] if outputs is None or row["name"] in outputs],
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": {
            key: {"string_value": value}
            for key, value in {"loraplex_socket": path, **parameters}.items()
        },
    }
    return {"model_config": json.dumps(config), "model_name": name, "model_repository": "/r/m"}


@pytest.fixture
def model(backend, path, model_class):
    with served_socket(backend, path) as served:
        model = model_class()
        model.initialize(arguments(path))
        model.served = served
        yield model
        model.finalize()


def request(text="hi", max_tokens=50, *more, **fields):
    tensors = [texts("text_input", text), Tensor("max_tokens", np.array([[max_tokens]], np.int32))]
    return Request([*tensors, *more], **fields)


def text_of(response):
    return response.outputs["text_output"].as_numpy().flat[0].decode()


STREAM = Tensor("stream", np.array([[True]]))


# ---------------------------------------------------------------- requests


def test_requests_are_served_at_the_same_time(model):
    submitted = [request("hi"), request("hi", 50, STREAM)]
    model.execute(submitted)
    (whole,) = submitted[0].sender.all()
    pieces = submitted[1].sender.all()
    assert len(pieces) > 2
    assert "hi" + "".join(map(text_of, pieces)) == text_of(whole)


def test_a_model_that_is_not_decoupled_gives_one_response(backend, path, model_class):
    with served_socket(backend, path):
        model = model_class()
        model.initialize(arguments(path, decoupled=False))
        submitted = [request("hi"), request("hi", 50, STREAM)]
        model.execute(submitted)
        (whole,) = submitted[0].sender.all()
        assert text_of(whole).startswith("hi")
        (refused,) = submitted[1].sender.all()
        assert refused.error.code == "INVALID_ARG"
        model.finalize()


def test_what_triton_takes_out_of_a_request_is_put_back(model, backend):
    submitted = request(id="mine", said={"x": 1}, timeout_us=5_000_000, correlation=7)
    model.execute([submitted])
    submitted.sender.all()
    (seen,) = backend.requests
    assert seen.client_request_id == "mine"
    assert seen.timeout_seconds == 5.0


def test_outputs_that_the_configuration_does_not_have_are_left_out(backend, path, model_class):
    with served_socket(backend, path):
        model = model_class()
        model.initialize(arguments(path, outputs=("cum_log_probs",)))
        submitted = request()
        model.execute([submitted])
        (reply,) = submitted.sender.all()
        assert reply.outputs == {}
        model.finalize()


def test_a_sender_that_has_ended_is_not_used(model):
    call_class = type(model).execute.__globals__["_TritonCall"]
    sender = fake.Sender()
    call = call_class(sender, model)
    call.submitted(None, 1)
    call.respond(Response(id=1))
    call.cancel_if_unwanted()
    call.respond(Response(id=1))
    assert len(sender.all()) == 1


def test_only_requested_outputs(model):
    submitted = request(outputs=("text_output", "cum_log_probs"))
    model.execute([submitted])
    (reply,) = submitted.sender.all()
    assert list(reply.outputs) == ["text_output"]


def test_an_error_has_tritons_code(model):
    submitted = request("hi" * 4000)
    model.execute([submitted])
    (reply,) = submitted.sender.all()
    assert reply.error.code == "INVALID_ARG"
    # TensorRT-LLM's text.
    assert "exceeds maximum input length" in reply.error.message


def test_a_request_without_a_waiting_client_is_aborted(model, backend):
    backend.delay_seconds = 0.05
    submitted = request("hi" * 500, 3000, STREAM)
    model.execute([submitted])
    submitted.sender.responses.get(timeout=60)
    submitted.sender.has_gone.set()
    replies = submitted.sender.all()
    assert (replies[-1].error.code, replies[-1].error.message) == (
        "CANCELLED",
        "Request was cancelled",
    )
    assert len(backend.aborted) == 1


def test_an_input_that_cannot_be_read_fails_its_request_alone(model):
    submitted = [request("hi", 50, Tensor("nope", np.zeros(1))), request("hi")]
    model.execute(submitted)
    assert submitted[0].sender.all()[0].error.code == "INTERNAL"
    assert submitted[1].sender.all()[0].error is None


def test_unload_ends_what_is_in_work(backend, path, model_class):
    with served_socket(backend, path):
        model = model_class()
        model.initialize(arguments(path))
        backend.delay_seconds = 0.05
        submitted = request("hi" * 500, 3000, STREAM)
        model.execute([submitted])
        submitted.sender.responses.get(timeout=60)
        model.finalize()
        assert submitted.sender.all()[-1].error.message == "the model is unloaded"
        assert eventually(lambda: len(backend.aborted) == 1)


# ---------------------------------------------------------------- no server, another server


def test_without_a_server_the_model_does_not_load_and_says_what_to_do(path, model_class):
    with pytest.raises(fake.TritonModelException, match=naming(path, "--request-socket")):
        model_class().initialize(arguments(path))


def test_a_server_without_the_model_is_refused(backend, path, model_class):
    with (
        served_socket(backend, path),
        pytest.raises(fake.TritonModelException, match=naming("other", "ensemble")),
    ):
        model_class().initialize(arguments(path, name="other"))


def test_a_lost_server_fails_its_requests_and_the_next_one_is_joined(model, backend, path):
    backend.delay_seconds = 0.05
    submitted = request("hi" * 500, 3000, STREAM)
    model.execute([submitted])
    submitted.sender.responses.get(timeout=60)
    model.served.stop()
    failed = submitted.sender.all()[-1]
    assert failed.error.code == "UNAVAILABLE"
    assert re.search(naming(path), failed.error.message)
    refused = request()
    model.execute([refused])
    assert refused.sender.all()[0].error.code == "UNAVAILABLE"
    assert eventually(lambda: not os.path.exists(path))
    with served_socket(EchoService(), path):
        assert eventually(lambda: _responded(model))


def _responded(model):
    submitted = request()
    model.execute([submitted])
    return submitted.sender.all()[0].error is None


# ---------------------------------------------------------------- tensors


SPECS = TensorSpecs(
    {
        "max_batch_size": 4,
        "input": [
            {"name": "b", "data_type": "TYPE_BF16", "dims": [-1]},
            {"name": "s", "data_type": "TYPE_STRING", "dims": [-1]},
            {"name": "h", "data_type": "TYPE_FP16", "dims": [-1]},
            {"name": "r", "data_type": "TYPE_INT32", "dims": [1], "reshape": {"shape": []}},
        ],
        "output": [],
    }
)


@pytest.mark.parametrize(
    ("name", "array", "data"),
    [
        ("s", np.array([[b"a", b"\xff\0"]], dtype=object), b"\1\0\0\0a\2\0\0\0\xff\0"),
        ("h", np.array([[1.5]], np.float16), b"\0\x3e"),
        ("b", np.array([[0x3F80, 0xC060]], np.uint16), b"\x80\x3f\x60\xc0"),
        ("b", np.zeros((1, 0), np.uint16), b""),
    ],
)
def test_tensors_to_the_wire_and_back(name, array, data):
    sent = SPECS.to_wire(Tensor(name, array))
    assert (sent.shape, sent.data) == (array.shape, data)
    back = from_wire(sent, fake)
    if name == "b":
        assert read_capsule(back.to_dlpack()) == (4, 16, list(array.shape), data)
    else:
        assert back.as_numpy().tolist() == array.tolist()


def read_capsule(capsule):
    """(code, bits, shape, bytes) of a DLPack capsule, which is then used up, as Triton does."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    address = get(ctypes.py_object(capsule), b"dltensor")
    tensor = np.ctypeslib.as_array((ctypes.c_uint8 * 48).from_address(address))
    code, bits, ndim = tensor[20], tensor[21], int(tensor[16:20].view(np.int32)[0])
    data, shape = tensor[:8].view(np.uint64)[0], tensor[24:32].view(np.uint64)[0]
    dims = list((ctypes.c_int64 * ndim).from_address(int(shape)))
    return code, bits, dims, ctypes.string_at(int(data), int(np.prod(dims)) * 2)


def test_a_reshaped_input_has_the_shape_that_the_client_sent():
    assert SPECS.to_wire(Tensor("r", np.zeros((3,), np.int32))).shape == (3, 1)


def test_all_types_come_back_to_numpy():
    wire = WireTensor("x", "BOOL", (2,), b"\1\0")
    assert from_wire(wire, fake).as_numpy().tolist() == [True, False]
    for datatype in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"):
        size = int(datatype.lstrip("UINT")) // 8
        wire = WireTensor("x", datatype, (1, 2), bytes([1]) + bytes(size - 1) + bytes(size))
        assert from_wire(wire, fake).as_numpy().tolist() == [[1, 0]]


# ---------------------------------------------------------------- the files


@pytest.mark.parametrize("file", STUB_FILES, ids=lambda file: file.name)
def test_the_files_stand_on_their_own_and_run_on_python_3_10(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 10))
    allowed = {*sys.stdlib_module_names, "numpy", "msgspec", "triton_python_backend_utils"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 or node.module.split(".")[0] in allowed
