"""Models that a repository declares as decoupled, or with exactly one response."""

import queue
import re

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from support.echo_service import EchoService
from support.naming import naming
from support.served_triton import served_triton
from support.triton_requests import TRUE, i32, tensors, text_request, token_request

NARROW = ModelOptions(max_beam_width=2)


def declared(name, kind, *, is_decoupled):
    base = EchoService().models()[0].name
    return ModelDeclaration(
        name=name,
        kind=kind,
        base_model=base,
        max_batch_size=4,
        is_decoupled=is_decoupled,
        options=NARROW,
    )


@pytest.fixture
def triton(backend):
    declarations = [
        declared("single", ENSEMBLE, is_decoupled=False),
        declared("many", ENSEMBLE, is_decoupled=True),
        declared("tokens", TENSORRT_LLM, is_decoupled=False),
    ]
    with served_triton(backend, declarations=declarations) as triton:
        yield triton


def error_of(send):
    with pytest.raises(InferenceServerException) as caught:
        send()
    return caught.value


def streamed(client, model, inputs):
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    client.async_stream_infer(model, inputs)
    client.stop_stream()
    return [results.get() for _ in range(results.qsize())]


def test_a_decoupled_model_has_no_single_response(triton):
    with tritonclient.http.InferenceServerClient(triton.http) as client:
        inputs = text_request(tritonclient.http)
        error = error_of(lambda: client.infer("many", inputs))
    assert error.status() == "501"
    words = "doesn't support models with decoupled transaction policy"
    # Triton's text.
    assert error.message() == f"HTTP end point {words}"
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        inputs = text_request(tritonclient.grpc)
        error = error_of(lambda: client.infer("many", inputs))
        assert error.status() == "StatusCode.UNIMPLEMENTED"
        assert error.message() == f"ModelInfer RPC {words}"
        pieces = streamed(client, "many", text_request(tritonclient.grpc, stream=TRUE))
        assert len(pieces) > 1
        assert len(streamed(client, "many", inputs)) == 1


def test_a_model_that_is_not_decoupled_gives_one_response(triton):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        assert client.infer("single", text_request(tritonclient.grpc)).as_numpy("text_output")
        (error,) = streamed(client, "single", text_request(tritonclient.grpc, stream=TRUE))
    expected = "Streaming is only supported if model is deployed using decoupled mode."
    assert expected in error.message()


def test_a_batch_needs_several_responses(triton):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        inputs = tensors(
            tritonclient.grpc,
            text_input=np.array([["a"], ["b"]], dtype=object),
            max_tokens=np.array([[4], [4]], dtype=np.int32),
        )
        error = error_of(lambda: client.infer("single", inputs))
        # TensorRT-LLM's text.
        assert "Batch size > 1 requires the tensorrt_llm backend to be using" in error.message()


def test_beams_up_to_the_declared_width(triton):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        inputs = text_request(tritonclient.grpc, beam_width=i32(3))
        error = error_of(lambda: client.infer("single", inputs))
        assert re.search(naming(2, "max_beam_width", "single"), error.message())
        assert client.infer("tokens", token_request(tritonclient.grpc)).as_numpy("output_ids").size


def test_configuration_says_it(triton):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        for name, is_decoupled in (("single", False), ("many", True)):
            config = client.get_model_config(name).config
            assert config.model_transaction_policy.decoupled is is_decoupled
            assert config.max_batch_size == 4
