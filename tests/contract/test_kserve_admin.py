"""Shared memory, settings, repository, statistics and health, requested with tritonclient."""

import base64
import json
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as client_memory
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from loraplex.core.principal import NONE, Principal, Rights
from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl
from support.echo_service import EchoService
from support.naming import naming
from support.served_triton import ServedTriton, served_triton
from support.triton_requests import TRUE, tensors, text_request, token_request


@pytest.fixture
def triton(backend: EchoService) -> Iterator[ServedTriton]:
    with served_triton(backend, control=ModelControl(ControlMode.EXPLICIT)) as triton:
        yield triton
    assert triton.service.num_active == 0


@pytest.fixture
def shared() -> Iterator[object]:
    """Two regions' worth of shared memory of this process."""
    key = f"loraplex_test_{uuid.uuid4().hex}"
    handle = client_memory.create_shared_memory_region("region", f"/{key}", 256)
    yield f"/{key}", handle
    client_memory.destroy_shared_memory_region(handle)


def as_dict(response):
    """Convert a response of either tritonclient to a dictionary."""
    if isinstance(response, dict | list):
        return response
    return MessageToDict(response, preserving_proto_field_name=True)


# ---------------------------------------------------------------- shared memory


def test_tensors_in_shared_memory(wire, shared):
    module, client = wire
    key, handle = shared
    client.register_system_shared_memory("region", key, 256)
    ids = np.array([[104, 105]], dtype=np.int32)
    client_memory.set_shared_memory_region(handle, [ids], offset=16)
    inputs = token_request(module, exclude_input_in_output=TRUE)
    inputs[0].set_shared_memory("region", 8, 16)
    output = module.InferRequestedOutput("output_ids")
    output.set_shared_memory("region", 128, 64)
    length = module.InferRequestedOutput("sequence_length")
    result = client.infer("tensorrt_llm", inputs, outputs=[output, length])
    found = result.get_output("output_ids")
    shape = found["shape"] if isinstance(found, dict) else list(found.shape)
    assert shape == [1, 1, 8]
    response = client_memory.get_contents_as_numpy(handle, np.int32, shape, 64)
    assert bytes(response.flat) == b"echo: hi"
    assert result.as_numpy("sequence_length").tolist() == [[8]]


def test_text_in_shared_memory(wire, shared):
    module, client = wire
    key, handle = shared
    client.register_system_shared_memory("region", key, 256)
    text = b"\x02\0\0\0hi"
    client_memory.set_shared_memory_region(handle, [np.frombuffer(text, dtype=np.uint8)])
    inputs = text_request(module)
    inputs[0].set_shared_memory("region", len(text))
    output = module.InferRequestedOutput("text_output")
    output.set_shared_memory("region", 100, 100)
    client.infer("ensemble", inputs, outputs=[output])
    response = client_memory.get_contents_as_numpy(handle, np.object_, [1], 100)
    assert response.tolist() == [b"hiecho: hi"]


def test_a_stream_writes_each_response_into_shared_memory(grpc_client, shared):
    key, handle = shared
    grpc_client.register_system_shared_memory("region", key, 256)
    output = tritonclient.grpc.InferRequestedOutput("text_output")
    output.set_shared_memory("region", 100)
    pieces = []

    def take(result, error):
        assert error is None
        pieces.append(client_memory.get_contents_as_numpy(handle, np.object_, [1]).tolist())

    grpc_client.start_stream(take)
    inputs = text_request(tritonclient.grpc, stream=TRUE)
    grpc_client.async_stream_infer("ensemble", inputs, outputs=[output])
    grpc_client.stop_stream()
    assert len(pieces) > 1


def test_status_and_unregistering(wire, shared):
    _, client = wire
    key, _ = shared
    client.register_system_shared_memory("a", key, 16, offset=8)
    client.register_system_shared_memory("b", key, 16)
    status = as_dict(client.get_system_shared_memory_status())
    names = status["regions"] if isinstance(status, dict) else [row["name"] for row in status]
    assert set(names) == {"a", "b"}
    row = as_dict(client.get_system_shared_memory_status("a"))
    row = row["regions"]["a"] if isinstance(row, dict) else row[0]
    assert (row["key"], int(row["offset"]), int(row["byte_size"])) == (key, 8, 16)
    client.unregister_system_shared_memory("a")
    client.unregister_system_shared_memory("a")
    # Triton's text.
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory"):
        client.get_system_shared_memory_status("a")
    client.unregister_system_shared_memory()
    assert not as_dict(client.get_system_shared_memory_status())


def statuses(module, http, name):
    return str(http) if module is tritonclient.http else f"StatusCode.{name}"


def test_bad_registrations(wire, shared):
    module, client = wire
    key, _ = shared
    client.register_system_shared_memory("a", key, 16)
    invalid = statuses(module, 400, "INVALID_ARGUMENT")
    for name, bad_key, size, status, fragment in (
        ("a", key, 16, statuses(module, 400, "ALREADY_EXISTS"), "already in manager"),
        ("b", key, 10**6, invalid, "failed to register shared memory region 'b': invalid args"),
        ("b", "/nope", 16, invalid, "Unable to open shared memory region: '/nope'"),
        ("b", "/../../etc/passwd", 16, invalid, "Unable to open shared memory region"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            client.register_system_shared_memory(name, bad_key, size)
        assert (raised.value.status(), fragment in raised.value.message()) == (status, True)


def test_memory_of_a_gpu_is_refused_by_name(wire):
    module, client = wire
    assert not as_dict(client.get_cuda_shared_memory_status())
    handle = base64.b64encode(bytes(64))
    # Triton's text.
    with pytest.raises(InferenceServerException, match="GPUs not supported") as raised:
        client.register_cuda_shared_memory("r", handle, 0, 16)
    assert raised.value.status() == statuses(module, 501, "UNIMPLEMENTED")
    # Triton's text.
    with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory"):
        client.get_cuda_shared_memory_status("r")
    client.unregister_cuda_shared_memory("r")
    client.unregister_cuda_shared_memory()


def test_regions_are_a_tenants_own(backend, shared):
    key, _ = shared

    def authenticate(headers):
        is_operator = "operator" in headers
        return Principal(headers.get("tenant", ""), Rights(manage=NONE, operator=is_operator))

    with (
        served_triton(backend, authenticate=authenticate) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):
        one, other = ({"tenant": name, "operator": "yes"} for name in ("one", "other"))
        without_rights = {"tenant": "one"}
        client.register_system_shared_memory("r", key, 16, headers=one)
        with pytest.raises(InferenceServerException, match=naming(key.lstrip("/"))):
            client.register_system_shared_memory("q", key, 16, headers=other)
        assert not client.get_system_shared_memory_status(headers=other).regions
        inputs = text_request(tritonclient.grpc)
        inputs[0].set_shared_memory("r", 16)
        # Triton's text.
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
            client.infer("ensemble", inputs, headers=other)
        for change in (
            lambda: client.update_log_settings({"log_info": True}, headers=without_rights),
            lambda: client.update_trace_settings(
                settings={"trace_rate": "5"}, headers=without_rights
            ),
            lambda: client.load_model("ensemble", headers=without_rights),
            lambda: client.unload_model("ensemble", headers=without_rights),
            lambda: client.get_log_settings(headers=without_rights),
            lambda: client.get_trace_settings(headers=without_rights),
            lambda: client.get_inference_statistics(headers=without_rights),
            lambda: client.get_system_shared_memory_status(headers=without_rights),
            lambda: client.register_system_shared_memory("s", key, 16, headers=without_rights),
            lambda: client.unregister_system_shared_memory("r", headers=without_rights),
        ):
            with pytest.raises(InferenceServerException, match=naming("operator", "one")):
                change()
        assert client.get_log_settings(headers=other).settings["log_error"].bool_param


# ---------------------------------------------------------------- settings


def settings_of(response):
    response = as_dict(response)
    if "settings" not in response:
        return response
    return {
        name: row.get("value", next(iter(row.values()), ""))
        for name, row in response["settings"].items()
    }


def test_trace_settings(wire):
    _, client = wire
    before = settings_of(client.get_trace_settings())
    assert set(before) == {
        *("trace_level", "trace_rate", "trace_count"),
        *("log_frequency", "trace_file", "trace_mode"),
    }
    assert before["trace_rate"] in ("1000", ["1000"])
    assert before["trace_level"] == ["OFF"]
    changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    after = settings_of(client.update_trace_settings("ensemble", changes))
    assert (after["trace_level"], after["trace_rate"]) in (
        (["TIMESTAMPS"], "5"),
        (["TIMESTAMPS"], ["5"]),
    )
    assert settings_of(client.get_trace_settings("ensemble")) == after
    assert settings_of(client.get_trace_settings()) == before
    cleared = {"trace_level": None, "trace_rate": None}
    assert settings_of(client.update_trace_settings("ensemble", cleared)) == before
    # Triton's text.
    with pytest.raises(InferenceServerException, match="Request for unknown model : nope"):
        client.get_trace_settings("nope")
    # Triton's text.
    with pytest.raises(InferenceServerException, match="Unable to parse 'trace_rate', got: abc"):
        client.update_trace_settings(settings={"trace_rate": "abc"})


def test_log_settings(wire):
    _, client = wire
    before = settings_of(client.get_log_settings())
    assert before["log_error"] is True
    after = settings_of(client.update_log_settings({"log_verbose_level": 1}))
    assert int(after["log_verbose_level"]) == 1
    assert settings_of(client.get_log_settings()) == after
    client.update_log_settings({"log_verbose_level": 0})
    # Triton's text.
    with pytest.raises(InferenceServerException, match="log file location can not be updated"):
        client.update_log_settings({"log_file": "/tmp/x"})


# ---------------------------------------------------------------- the repository


def test_models_are_unloaded_and_loaded(wire):
    module, client = wire
    client.unload_model("tensorrt_llm")
    assert not client.is_model_ready("tensorrt_llm")
    # Triton's text.
    with pytest.raises(InferenceServerException, match="has no available versions") as raised:
        client.infer("tensorrt_llm", token_request(module))
    assert raised.value.status() == statuses(module, 404, "NOT_FOUND")
    index = as_dict(client.get_model_repository_index())
    index = index["models"] if isinstance(index, dict) else index
    states = {row["name"]: (row["state"], row.get("reason", "")) for row in index}
    assert states["tensorrt_llm"] == ("UNAVAILABLE", "unloaded")
    assert states["ensemble"] == ("READY", "")
    client.load_model("tensorrt_llm")
    client.infer("tensorrt_llm", token_request(module))
    client.unload_model("ensemble", unload_dependents=True)
    assert not client.is_model_ready("tensorrt_llm")
    client.load_model("ensemble")


def test_a_load_may_bring_a_configuration(wire):
    module, client = wire
    client.load_model("ensemble", config=json.dumps({"max_batch_size": 1}))
    config = as_dict(client.get_model_config("ensemble"))
    assert config.get("config", config)["max_batch_size"] == 1
    two = np.array([["a"], ["b"]], dtype=object)
    many = tensors(module, text_input=two, max_tokens=np.full((2, 1), 5, dtype=np.int32))
    # Triton's text.
    with pytest.raises(InferenceServerException, match="must be <= 1 "):
        client.infer("ensemble", many)
    for bad, more, fragment in (
        ("{", {}, "must be a ModelConfig as JSON"),
        ("{}", {"file:1/model.py": b"x"}, "files of a model cannot be replaced"),
    ):
        with pytest.raises(InferenceServerException, match=fragment):
            client.load_model("ensemble", config=bad, files=more or None)
    client.load_model("ensemble")
    client.infer("ensemble", many)
    # Triton's text.
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("nope")


def test_without_explicit_control_nothing_is_loaded(backend):
    with served_triton(backend) as triton:
        for module, address in (
            (tritonclient.http, triton.http),
            (tritonclient.grpc, triton.grpc),
        ):
            with module.InferenceServerClient(address) as client:
                for change in (client.load_model, client.unload_model):
                    # Triton's text.
                    with pytest.raises(InferenceServerException, match="explicit model load / unl"):
                        change("ensemble")
