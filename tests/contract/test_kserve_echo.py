"""The Triton front ends as their real client sees them: tritonclient over sockets.

The backend is an EchoService: a token is a byte, and the output for "hi" is "echo: hi".
"""

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from loraplex.core.errors import UnauthenticatedError
from loraplex.core.principal import LOCAL
from support.echo_service import EchoService
from support.served_triton import ServedTriton, served_triton
from support.triton_requests import TRUE, i32, tensors, text_request, token_request


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService(("echo", "other/echo"))
    backend.register("sheep", task_id=0)
    backend.register("goat", task_id=2**63 + 1)
    return backend


@pytest.fixture
def http_client(triton: ServedTriton) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(triton.http) as client:
        yield client


# ---------------------------------------------------------------- server and models


def test_health_is_the_truth(backend, wire):
    _, client = wire
    ready = ["ensemble", "tensorrt_llm", "echo"]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert [name for name in [*ready, "nope"] if client.is_model_ready(name)] == ready
    assert not client.is_model_ready("ensemble", "2")
    backend.unready_reason = "the engine restarts"
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("ensemble")


def test_metadata_is_the_same_over_both_wires(http_client, grpc_client):
    as_json = functools.partial(grpc_client.get_model_metadata, as_json=True)
    for model in ("ensemble", "tensorrt_llm"):
        over_http = http_client.get_model_metadata(model)
        over_grpc = as_json(model)
        assert over_http["name"] == over_grpc["name"] == model
        for side in ("inputs", "outputs"):
            shapes = {row["name"]: [int(n) for n in row["shape"]] for row in over_grpc[side]}
            assert {row["name"]: row["shape"] for row in over_http[side]} == shapes
    assert http_client.get_server_metadata()["name"] == grpc_client.get_server_metadata().name


def test_configuration(http_client, grpc_client):
    config = http_client.get_model_config("tensorrt_llm")
    proto = grpc_client.get_model_config("tensorrt_llm").config
    assert config["max_batch_size"] == proto.max_batch_size == 128
    assert [row["name"] for row in config["input"]] == [row.name for row in proto.input]
    assert proto.input[0].allow_ragged_batch
    assert proto.input[3].HasField("reshape")
    assert config["backend"] == proto.backend == "tensorrtllm"


def test_repository_index(backend, http_client, grpc_client):
    five = ["ensemble", "tensorrt_llm", "preprocessing", "postprocessing", "tensorrt_llm_bls"]
    names = [*five, "echo", "other/echo"]
    assert [row["name"] for row in http_client.get_model_repository_index()] == names
    backend.unready_reason = "loading"
    models = grpc_client.get_model_repository_index().models
    for model in models:
        base = model.name if model.name == "other/echo" else "echo"
        reason = f"the engine of model {base!r} is restarting: loading"
        assert (model.state, model.reason) == ("UNAVAILABLE", reason)
    assert len(models) == 7


def test_statistics_count_truly(wire):
    module, client = wire
    client.infer("ensemble", text_request(module))
    with pytest.raises(InferenceServerException):
        client.infer("ensemble", text_request(module, max_tokens=0))
    stats = client.get_inference_statistics("ensemble")
    row = stats["model_stats"][0] if isinstance(stats, dict) else stats.model_stats[0]
    if not isinstance(row, dict):
        assert (row.inference_count, row.inference_stats.fail.count) == (1, 1)
    else:
        assert (row["inference_count"], row["inference_stats"]["fail"]["count"]) == (1, 1)


# ---------------------------------------------------------------- unary inference


def test_text(wire):
    module, client = wire
    result = client.infer("ensemble", text_request(module), request_id="abc")
    assert result.as_numpy("text_output").tolist() == [b"hiecho: hi"]
    response = result.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "abc"


def test_text_without_the_prompt_and_with_an_adapter(wire):
    module, client = wire
    more = {"exclude_input_in_output": TRUE, "lora_task_id": np.array([[0]], dtype=np.uint64)}
    result = client.infer("ensemble", text_request(module, **more))
    assert result.as_numpy("text_output").tolist() == [b"echo+sheep: hi"]
    more["lora_task_id"] = np.array([[2**63 + 1]], dtype=np.uint64)
    result = client.infer("other/echo", text_request(module, exclude_input_in_output=TRUE))
    assert result.as_numpy("text_output").tolist() == [b"other/echo: hi"]
    result = client.infer("echo", text_request(module, **more))
    assert result.as_numpy("text_output").tolist() == [b"echo+goat: hi"]


def test_token_ids(wire):
    module, client = wire
    result = client.infer("tensorrt_llm", token_request(module), parameters={"Streaming": False})
    assert bytes(result.as_numpy("output_ids")[0, 0].tolist()) == b"hiecho: hi"
    assert result.as_numpy("output_ids").shape == (1, 1, 10)
    assert result.as_numpy("sequence_length").tolist() == [[10]]
    response = result.get_response()
    outputs = response["outputs"] if isinstance(response, dict) else response.outputs
    first = outputs[0]
    assert (first["name"] if isinstance(first, dict) else first.name) == "output_ids"


def test_without_end_id_token_ids_run_to_their_length(wire):
    module, client = wire
    result = client.infer("tensorrt_llm", token_request(module, length=20, end_id=i32(-1)))
    assert result.as_numpy("sequence_length").tolist() == [[22]]


def test_log_probs_and_requested_outputs(wire):
    module, client = wire
    wanted = ["cum_log_probs", "output_log_probs", "sequence_length"]
    result = client.infer(
        "tensorrt_llm",
        token_request(module, return_log_probs=TRUE, exclude_input_in_output=TRUE),
        outputs=[module.InferRequestedOutput(name) for name in wanted],
    )
    log_probs = result.as_numpy("output_log_probs")
    assert log_probs.shape == (1, 1, 8)
    assert result.as_numpy("cum_log_probs").tolist() == [[log_probs.sum()]]
    assert result.as_numpy("output_ids") is None


def test_batch_and_sequences_are_stacked(wire):
    module, client = wire
    texts = np.array([["a"], ["bcd"]], dtype=object)
    many = tensors(module, text_input=texts, max_tokens=np.full((2, 1), 50, dtype=np.int32))
    result = client.infer("ensemble", many)
    assert result.as_numpy("text_output").tolist() == [b"aecho: a", b"bcdecho: bcd"]
    two = token_request(module, num_return_sequences=i32(2), exclude_input_in_output=TRUE)
    result = client.infer("tensorrt_llm", two)
    assert result.as_numpy("sequence_length").tolist() == [[8, 11]]
    assert result.as_numpy("output_ids").shape == (1, 2, 11)
    assert result.as_numpy("output_ids")[0, 0, 8:].tolist() == [-1, -1, -1]


def test_stop_words_are_kept_in_the_output(wire):
    module, client = wire
    words = np.array([["", ": "]], dtype=object)
    result = client.infer("ensemble", text_request(module, stop_words=words))
    assert result.as_numpy("text_output").tolist() == [b"hiecho: "]
    # the words "h" and "o:" of a [2, n] list; "h" comes first
    listed = np.array([[[104, 111, 58], [1, 3, -1]]], dtype=np.int32)
    result = client.infer("tensorrt_llm", token_request(module, stop_words_list=listed))
    assert bytes(result.as_numpy("output_ids")[0, 0].tolist()) == b"hiech"


def test_json_tensors_and_compression(http_client):
    inputs = [
        tritonclient.http.InferInput("text_input", [1, 1], "BYTES"),
        tritonclient.http.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([["é"]], dtype=object), binary_data=False)
    inputs[1].set_data_from_numpy(i32(50), binary_data=False)
    outputs = [tritonclient.http.InferRequestedOutput("text_output", binary_data=False)]
    for algorithm in (None, "gzip", "deflate"):
        result = http_client.infer(
            "ensemble",
            inputs,
            outputs=outputs,
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert result.as_numpy("text_output").tolist() == ["éecho: é"]


# ---------------------------------------------------------------- tenants


def test_authentication_reads_headers_and_metadata(backend):
    def authenticate(headers):
        if headers.get("authorization") != "Bearer right":
            raise UnauthenticatedError("the key is not known")
        return LOCAL

    with served_triton(backend, authenticate=authenticate) as triton:
        for module, address, status in (
            (tritonclient.http, triton.http, "401"),
            (tritonclient.grpc, triton.grpc, "StatusCode.UNAUTHENTICATED"),
        ):
            with module.InferenceServerClient(address) as client:
                with pytest.raises(InferenceServerException) as raised:
                    client.infer("ensemble", text_request(module))
                assert raised.value.status() == status
                headers = {"authorization": "Bearer right"}
                client.infer("ensemble", text_request(module), headers=headers)
