"""Vectors and probabilities of labels over the Triton front ends: tritonclient on both wires.

Each request is compared with OpenAI's route for the same text and adapter: EchoService makes
vectors of the prompt's tokens and the adapters.
"""

import json
import queue
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.grpc
from starlette.applications import Starlette
from tritonclient.utils import InferenceServerException

from loraplex.core.class_format import ClassFormat
from loraplex.core.task import Pool, PoolKind
from loraplex.core.vector_format import TextPrompts, VectorFormat
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM, VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served
from support.served_triton import served_triton
from support.triton_requests import i32, tensors

EMBEDDING, PROBABILITIES = "embedding", "probabilities"


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService()
    backend.register("sheep", task_id=7)
    backend.register("goat", task_id=8)
    set_card(backend, classes=ClassFormat(num_labels=3))
    return backend


@pytest.fixture
def openai(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as url, httpx.Client(base_url=url, timeout=None) as client:
        yield client


def set_card(backend: EchoService, **fields: Any) -> None:
    model = backend.model("echo")
    model.card = msgspec.structs.replace(model.card, **fields)


def text_inputs(module: Any, *texts: str, **more: Any) -> list[Any]:
    return tensors(module, text_input=np.array([[text] for text in texts], dtype=object), **more)


def infer(
    wire: Any, inputs: list[Any], *names: str, model: str = "ensemble", **arguments: Any
) -> Any:
    module, client = wire
    outputs = [module.InferRequestedOutput(name) for name in names]
    return client.infer(model, inputs, outputs=outputs, **arguments)


def expected(openai: httpx.Client, model: str, text: Any, **body: Any) -> Any:
    response = openai.post("/v1/embeddings", json={"model": model, "input": text, **body})
    assert response.status_code == 200, response.text
    return np.array(response.json()["data"][0]["embedding"], np.float32)


def test_a_vector_by_name_with_the_adapter_of_the_request(wire, backend, openai):
    module = wire[0]
    result = infer(wire, text_inputs(module, "hi"), EMBEDDING)
    assert [row["name"] for row in outputs_of(result)] == [EMBEDDING]
    assert (result.as_numpy(EMBEDDING) == expected(openai, "echo", "hi")).all()
    assert backend.requests[-1].task == Pool()
    task = np.array([[7]], np.uint64)
    adapted = infer(wire, text_inputs(module, "hi", lora_task_id=task), EMBEDDING)
    assert (adapted.as_numpy(EMBEDDING) == expected(openai, "sheep", "hi")).all()
    assert (adapted.as_numpy(EMBEDDING) != result.as_numpy(EMBEDDING)).any()
    assert parameter(adapted, "adapter") == "sheep"
    named = infer(
        wire,
        text_inputs(module, "hi"),
        EMBEDDING,
        parameters={"adapters": '[{"name": "goat"}]', "dimensions": 3},
    )
    assert (named.as_numpy(EMBEDDING) == expected(openai, "goat", "hi", dimensions=3)).all()


def test_each_element_of_a_batch_has_its_adapter(wire, openai):
    tasks = np.array([[7], [8]], np.uint64)
    result = infer(wire, text_inputs(wire[0], "one", "two", lora_task_id=tasks), EMBEDDING)
    vectors = result.as_numpy(EMBEDDING)
    assert vectors.dtype == np.float32
    assert (vectors[0] == expected(openai, "sheep", "one")).all()
    assert (vectors[1] == expected(openai, "goat", "two")).all()


def test_token_ids_have_vectors_too(wire, openai):
    ids = i32(*b"hi")
    result = infer(wire, tensors(wire[0], input_ids=ids), EMBEDDING, model="tensorrt_llm")
    assert (result.as_numpy(EMBEDDING) == expected(openai, "echo", ids[0].tolist())).all()


def test_probabilities_are_those_of_classify(wire, backend, openai):
    result = infer(wire, text_inputs(wire[0], "hi"), PROBABILITIES)
    entry = openai.post("/classify", json={"model": "echo", "input": "hi"}).json()["data"][0]
    assert result.as_numpy(PROBABILITIES)[0].tolist() == pytest.approx(entry["probs"])
    assert backend.requests[0].task.kind is PoolKind.SCORE
    module, client = wire
    best = module.InferRequestedOutput(PROBABILITIES, class_count=1)
    top = client.infer("ensemble", text_inputs(module, "hi"), outputs=[best])
    index = int(np.argmax(entry["probs"]))
    assert top.as_numpy(PROBABILITIES).ravel()[0].decode().split(":")[1] == str(index)


def test_prompts_of_the_model_folder(wire, backend, openai):
    texts = {"query": "Find: ", "document": ""}
    prompts = TextPrompts(texts=texts, default="document")
    set_card(backend, vectors=VectorFormat(prompts=prompts))
    result = infer(
        *(wire, text_inputs(wire[0], "hi"), EMBEDDING), parameters={"prompt_name": "query"}
    )
    assert (result.as_numpy(EMBEDDING) == expected(openai, "echo", "Find: hi")).all()
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, text_inputs(wire[0], "hi"), EMBEDDING, parameters={"prompt_name": "passage"})
    assert re.search(naming("prompt_name", "passage", "query"), str(caught.value))


@pytest.mark.parametrize(
    ("names", "parameters", "words"),
    [
        ((EMBEDDING, "text_output"), {}, (EMBEDDING, "text_output")),
        ((EMBEDDING, PROBABILITIES), {}, (EMBEDDING, PROBABILITIES)),
        ((EMBEDDING,), {"dimensions": 0}, ("dimensions", "0")),
        ((EMBEDDING,), {"dimensions": "3"}, ("dimensions", "'3'")),
        ((PROBABILITIES,), {"dimensions": 3}, ("dimensions", EMBEDDING)),
        (("text_output",), {"prompt_name": "query"}, ("prompt_name", EMBEDDING)),
    ],
)
def test_what_is_refused(wire, backend, names, parameters, words):
    inputs = text_inputs(wire[0], "hi", max_tokens=i32(5))
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, inputs, *names, parameters=parameters)
    assert re.search(naming(*words), str(caught.value))
    assert not backend.requests


def test_an_empty_text_has_no_vector(wire, backend):
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, text_inputs(wire[0], ""), EMBEDDING)
    assert re.search(naming("text_input"), str(caught.value))
    assert not backend.requests


def test_a_model_without_vectors_refuses_with_the_reason(wire, backend):
    set_card(backend, vectors=VectorFormat(problem="it pools by squashing"))
    with pytest.raises(InferenceServerException) as caught:
        infer(wire, text_inputs(wire[0], "hi"), EMBEDDING)
    assert re.search(naming("squashing"), str(caught.value))


def test_a_model_built_without_lora_refuses_adapters_here_too(backend):
    only = ModelDeclaration(
        name="tensorrt_llm",
        kind=TENSORRT_LLM,
        base_model="echo",
        max_batch_size=4,
        options=ModelOptions(lora_enabled=False),
    )
    task = np.array([[7]], np.uint64)
    inputs = tensors(tritonclient.grpc, input_ids=i32(*b"hi"), lora_task_id=task)
    with (
        served_triton(backend, declarations=[only]) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        infer((tritonclient.grpc, client), inputs, EMBEDDING, model="tensorrt_llm")
    assert re.search(naming("LoRA"), str(caught.value))


# ---------------------------------------------------------------- the vLLM backend


def test_a_request_of_the_openai_front_end_to_a_vllm_model(backend, openai):
    """`embedding_request`, as Triton's OpenAI front end sends it: a JSON list in text_output."""
    only = ModelDeclaration(name="vllm_model", kind=VLLM, base_model="echo")
    with (
        served_triton(backend, declarations=[only]) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):

        def request(sent: Any, *names: str, **parameters: Any) -> Any:
            body = sent if isinstance(sent, str) else json.dumps(sent)
            inputs = tensors(
                tritonclient.grpc,
                text_input=np.array([""], dtype=object),
                embedding_request=np.array([body], dtype=object),
                return_num_input_tokens=np.array([True]),
                return_num_output_tokens=np.array([True]),
            )
            wire = (tritonclient.grpc, client)
            return infer(wire, inputs, *names, model="vllm_model", parameters=parameters)

        result = request({"input": "hi", "pooling_params": {"dimensions": [3]}})
        vector = json.loads(result.as_numpy("text_output")[0])
        assert vector == expected(openai, "echo", "hi", dimensions=3).tolist()
        num_tokens = len(backend.requests[0].prompt) + 1
        assert result.as_numpy("num_input_tokens").tolist() == [num_tokens]
        assert result.as_numpy("num_output_tokens").tolist() == [0]
        ids = request({"input": [*b"hi"]}, EMBEDDING, lora_name="sheep")
        assert (ids.as_numpy(EMBEDDING) == expected(openai, "sheep", [*b"hi"])).all()
        empty = '{"input": "a", "pooling_params": {"dimensions": []}}'
        for bad in ("{", '{"input": 5}', '{"input": ""}', '{"input": "a", "text": "b"}', empty):
            with pytest.raises(InferenceServerException) as caught:
                request(bad)
            assert re.search(naming("embedding_request"), str(caught.value))
        with pytest.raises(InferenceServerException) as caught:
            request({"input": "hi", "pooling_params": {"dimensions": 3}}, PROBABILITIES)
        assert re.search(naming("dimensions", EMBEDDING), str(caught.value))


def test_a_decoupled_model_sends_one_final_response(backend, openai):
    """The tests of the vLLM backend request it over a stream."""
    only = ModelDeclaration(name="vllm_model", kind=VLLM, base_model="echo", is_decoupled=True)
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    inputs = tensors(
        tritonclient.grpc,
        text_input=np.array([""], dtype=object),
        embedding_request=np.array(['{"input": "hi", "pooling_params": {}}'], dtype=object),
    )
    with (
        served_triton(backend, declarations=[only]) as triton,
        tritonclient.grpc.InferenceServerClient(triton.grpc) as client,
    ):
        client.start_stream(lambda result, error: results.put((result, error)))
        wanted = [tritonclient.grpc.InferRequestedOutput("text_output")]
        client.async_stream_infer("vllm_model", inputs, outputs=wanted)
        result, error = results.get(timeout=60)
        client.stop_stream()
    assert error is None, error
    assert json.loads(result.as_numpy("text_output")[0]) == expected(openai, "echo", "hi").tolist()
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert results.empty()


# ---------------------------------------------------------------- both wires' results


def outputs_of(result: Any) -> list[dict[str, Any]]:
    return as_dict(result)["outputs"]


def parameter(result: Any, name: str) -> Any:
    found = as_dict(result)["parameters"][name]
    return found["string_param"] if isinstance(found, dict) else found


def as_dict(result: Any) -> dict[str, Any]:
    is_http = not hasattr(result.get_response(), "DESCRIPTOR")
    return result.get_response() if is_http else result.get_response(as_json=True)
