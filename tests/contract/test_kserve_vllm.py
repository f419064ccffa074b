"""A model of Triton's vLLM backend, used over a tritonclient stream and by generate."""

import json
import queue
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.errors import AdapterNotFoundError, RowFailedError
from loraplex.frontends.kserve.models.kinds import VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from support.naming import naming
from support.served_triton import ServedTriton, served_triton

MODEL = "vllm_model"
GREEDY = {"temperature": "0", "max_tokens": "100"}
"""Sampling parameters as texts, which is how the samples' clients send them."""


def declaration(**options: Any) -> ModelDeclaration:
    return ModelDeclaration(
        name=MODEL,
        kind=VLLM,
        base_model="echo",
        max_batch_size=0,
        is_decoupled=True,
        options=ModelOptions(**options),
    )


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
def triton(backend, options) -> Iterator[ServedTriton]:
    backend.register("sheep")
    backend.register("goat")
    with served_triton(backend, declarations=[declaration(**options)]) as triton:
        yield triton
    assert triton.service.num_active == 0


@pytest.fixture
def stream(triton) -> Iterator["Stream"]:
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        yield Stream(client)


class Stream:
    """Requests over one ModelStreamInfer."""

    def __init__(self, client: tritonclient.grpc.InferenceServerClient) -> None:
        self._client = client
        self._results: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self._results.put((result, error)))

    def generate(
        self,
        sampling: dict[str, Any] | None,
        *,
        prompt: str = "hi",
        parameters: dict[str, Any] | None = None,
        **flags: bool,
    ) -> list[Any]:
        """All responses; raises the error if there is one."""
        arrays = {"text_input": np.array([prompt], dtype=object)}
        if sampling is not None:
            arrays["sampling_parameters"] = np.array([json.dumps(sampling)], dtype=object)
        arrays |= {name: np.array([flag]) for name, flag in flags.items()}
        inputs = []
        for name, array in arrays.items():
            inputs.append(
                tritonclient.grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            )
            inputs[-1].set_data_from_numpy(array)
        self._client.async_stream_infer(MODEL, inputs, parameters=parameters)
        results = []
        while True:
            result, error = self._results.get(timeout=60)
            if error is not None:
                raise error
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results


def texts(results: list[Any]) -> list[str]:
    return [text.decode() for result in results for text in result.as_numpy("text_output")]


def test_what_it_declares(triton):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        metadata = client.get_model_metadata(MODEL, as_json=True)
    assert metadata["platform"] == "vllm"
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["1"]}
    assert [row["name"] for row in metadata["outputs"]] == [
        "text_output",
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
    ]


def test_one_response_begins_with_the_prompt_if_it_is_not_excluded(stream, backend):
    assert texts(stream.generate(GREEDY)) == ["hiecho: hi"]
    assert texts(stream.generate(GREEDY, exclude_input_in_output=True)) == ["echo: hi"]
    assert texts(stream.generate(GREEDY, exclude_input_in_output=False)) == ["hiecho: hi"]
    sampling = backend.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.0, 100, None)


def test_a_stream_gives_what_is_new(stream):
    pieces = texts(stream.generate(GREEDY, stream=True))
    assert len(pieces) > 5
    assert "".join(pieces) == "echo: hi"
    # vLLM's text.
    with pytest.raises(InferenceServerException, match="`exclude_input_in_output` = False is not"):
        stream.generate(GREEDY, stream=True, exclude_input_in_output=False)


def test_sampling_parameters_may_be_parameters_of_the_request(stream, backend):
    parameters = {"max_tokens": "3", "top_k": 5, "temperature": "0.5", "lora_name": "sheep"}
    assert texts(stream.generate(None, parameters=parameters)) == ["hiech"]
    request = backend.requests[-1]
    assert (request.sampling.top_k, request.sampling.temperature) == (5, 0.5)
    assert request.adapters == (AdapterChoice(ByName("sheep")),)
    stream.generate(GREEDY, parameters={"max_tokens": "3"})
    assert backend.requests[-1].sampling.max_tokens == 100, "the tensor counts alone"
    stream.generate({}, parameters={})
    assert backend.requests[-1].sampling.max_tokens == 16, "vLLM's default"


def test_every_response_has_what_was_wished_for(stream):
    wishes = {
        f"return_{name}": True
        for name in (
            "finish_reason",
            "cumulative_logprob",
            "logprobs",
            "num_input_tokens",
            "num_output_tokens",
        )
    }
    results = stream.generate(
        GREEDY | {"max_tokens": 2, "logprobs": 1, "n": 2}, stream=True, **wishes
    )
    first, last = results[0], results[-1]
    assert first.as_numpy("finish_reason").tolist() == [b"None", b"None"]
    assert last.as_numpy("finish_reason").tolist() == [b"length", b"length"]
    assert first.as_numpy("num_input_tokens").tolist() == [3]
    assert [r.as_numpy("num_output_tokens").tolist() for r in results] == [[1, 1], [1, 1]]
    assert first.as_numpy("text_output").tolist() == [b"e", b"e"]
    per_token = json.loads(last.as_numpy("logprobs")[0])
    assert per_token == [{"99": {"logprob": -0.125, "rank": 1, "decoded_token": "c"}}]
    assert last.as_numpy("cumulative_logprob").tolist() == [-0.375, -0.375]


def test_the_whole_response_has_its_numbers_too(stream):
    wishes = {"return_finish_reason": True, "return_num_output_tokens": True}
    [result] = stream.generate(
        GREEDY, return_logprobs=True, return_cumulative_logprob=True, **wishes
    )
    assert result.as_numpy("finish_reason").tolist() == [b"stop"]
    assert result.as_numpy("num_output_tokens").tolist() == [9], "with the end token, as vLLM"
    assert result.as_numpy("logprobs").tolist() == [b"null"], "none were requested"
    assert result.as_numpy("cumulative_logprob")[0] < 0
    assert result.as_numpy("num_input_tokens") is None
    [result] = stream.generate(GREEDY)
    assert result.as_numpy("finish_reason") is None


def failed(stream: Stream, sampling: dict[str, Any], *, is_streamed: bool = False) -> str:
    with pytest.raises(InferenceServerException) as caught:
        stream.generate(sampling, stream=is_streamed)
    return caught.value.message()


def test_adapters_by_name(stream):
    assert texts(stream.generate(GREEDY | {"lora_name": "goat"})) == ["hiecho+goat: hi"]
    # vLLM's text.
    assert failed(stream, GREEDY | {"lora_name": "wolf"}) == (
        "LoRA wolf is not supported, we currently support ['goat', 'sheep']"
    )


@pytest.mark.parametrize("options", [{"lora_enabled": False}])
def test_adapters_of_a_model_without_lora(stream):
    # vLLM's text.
    assert failed(stream, {"lora_name": "sheep"}) == "LoRA feature is not enabled."
    assert texts(stream.generate(GREEDY)) == ["hiecho: hi"]


def test_adapters_whose_files_are_broken(stream, backend):
    backend.plant(AdapterNotFoundError("adapter 'wolf' could not be loaded: torn", reason="torn"))
    # vLLM's text.
    assert failed(stream, {"lora_name": "wolf"}) == "LoRA wolf could not be loaded: torn"


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_p": "high"}, ("top_p", "high")),
        ({"top_p": 7}, ("top_p", "(0, 1]", 7.0)),
        (
            {"best": 1},
            ("Unexpected sampling parameter 'best'; the parameters are n, best_of",),
        ),  # vLLM's text.
        ({"logits_processors": ["x"]}, ("logits_processors",)),
        ([1], ("sampling_parameters", "JSON")),
    ],
)
def test_errors_name_what_is_wrong(stream, sampling, named):
    text = failed(stream, sampling)
    assert text.startswith("Error generating stream: ")
    assert re.search(naming(*named), text)


def test_an_error_in_mid_stream(stream, backend):
    backend.plant(RowFailedError("a row failed"), after_outputs=2)
    # vLLM's text.
    assert failed(stream, GREEDY, is_streamed=True) == "Error generating stream: a row failed"


def test_an_output_ends_where_the_models_length_does(stream, backend):
    assert texts(stream.generate({**GREEDY, "max_tokens": 1_000_000})) == ["hiecho: hi"]
    assert backend.requests[-1].ends_at_max_len


@pytest.mark.parametrize("options", [{"checks_health": True}])
def test_an_unhealthy_engine_is_reported_at_once(triton, stream, backend):
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        assert texts(stream.generate(GREEDY)) == ["hiecho: hi"]
        assert client.is_model_ready(MODEL)
        backend.unready_reason = "it died"
        # vLLM's text.
        assert "Model is unavailable due to unhealthy vLLM engine" in failed(stream, GREEDY)
        assert not client.is_model_ready(MODEL)
        backend.unready_reason = ""
        assert client.is_model_ready(MODEL)
        assert texts(stream.generate(GREEDY)) == ["hiecho: hi"]


# ---------------------------------------------------------------- the generate extension


def post(triton: ServedTriton, body: dict[str, Any], path: str = "generate") -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{triton.http}/v2/models/{MODEL}/{path}", json.dumps(body).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_generate(triton):
    parameters = {
        "stream": False,
        "temperature": 0,
        "lora_name": "sheep",
        "exclude_input_in_output": True,
    }
    status, body = post(triton, {"text_input": "hi", "parameters": parameters})
    assert status == 200
    assert json.loads(body)["text_output"] == "echo+sheep: hi"
    status, body = post(
        triton, {"text_input": "hi", "parameters": parameters | {"lora_name": "wolf"}}
    )
    assert status == 404
    # vLLM's text.
    assert json.loads(body)["error"] == (
        "LoRA wolf is not supported, we currently support ['goat', 'sheep']"
    )


def test_generate_stream(triton):
    body = {"text_input": "hi", "parameters": {"stream": True, "max_tokens": 4}}
    status, events = post(triton, body, "generate_stream")
    assert status == 200
    pieces = [json.loads(event[6:])["text_output"] for event in events.strip().split("\n\n")]
    assert "".join(pieces) == "echo"
