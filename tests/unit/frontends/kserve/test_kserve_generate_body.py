import functools

import msgspec
import pytest

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.http.body import decode_generate, encode_generate, fitted_shape
from loraplex.frontends.kserve.messages import InferResponse
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.tensors import numbers, strings
from support.echo_service import EchoService
from support.naming import refused


@pytest.fixture
def ensemble():
    return Catalog(EchoService()).find("ensemble")


@pytest.fixture
def tensorrt_llm():
    return Catalog(EchoService()).find("tensorrt_llm")


def decode(model, **document):
    request = decode_generate(model, "", msgspec.json.decode(msgspec.json.encode(document)))
    return request, {t.name: (t.shape, t.array.ravel().tolist()) for t in request.inputs}


def test_inputs_become_tensors_and_the_rest_parameters(ensemble):
    request, tensors = decode(
        ensemble, id="7", text_input="hi", max_tokens=5, temperature=1, note="x", flag=True
    )
    assert request.request_id == "7"
    assert tensors == {
        "text_input": ((1, 1), [b"hi"]),
        "max_tokens": ((1, 1), [5]),
        "temperature": ((1, 1), [1.0]),
    }
    assert request.parameters == {"note": "x", "flag": True}


def test_members_of_parameters_are_treated_alike(ensemble):
    request, tensors = decode(ensemble, parameters={"max_tokens": 5, "id": "inner", "x": 1.5})
    assert tensors == {"max_tokens": ((1, 1), [5])}
    assert request.parameters == {"id": "inner", "x": 1.5}
    assert request.request_id == ""


def test_lists_fill_the_innermost_free_dimension(ensemble, tensorrt_llm):
    _, tensors = decode(ensemble, stop_words=["a", "b"], max_tokens=[1, 2], bad_words=[])
    assert tensors["stop_words"] == ((1, 2), [b"a", b"b"])
    assert tensors["max_tokens"] == ((2, 1), [1, 2])
    assert tensors["bad_words"][0] == (1, 0)
    _, tensors = decode(tensorrt_llm, input_ids=[1, 2, 3], stop_words_list=[5, 6, 1, 2])
    assert tensors["input_ids"][0] == (1, 3)
    assert tensors["stop_words_list"][0] == (1, 2, 2)


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((-1, 1), 3, (3, 1)),
        ((-1, -1), 3, (1, 3)),
        ((-1, 2, -1), 6, (1, 2, 3)),
        ((-1, 2, -1), 5, None),
        ((-1, -1, 3), 6, (1, 2, 3)),
        ((-1, -1), 0, (1, 0)),
        ((2, 2), 4, (2, 2)),
        ((2, 2), 3, None),
    ],
)
def test_fitted_shape(dims, count, shape):
    assert fitted_shape(dims, count) == shape


def test_lists_in_lists_count_by_their_elements(ensemble):
    _, tensors = decode(ensemble, max_tokens=[[1]], stop_words=[["a", "b"], ["c"]])
    assert tensors == {"max_tokens": ((1, 1), [1]), "stop_words": ((1, 3), [b"a", b"b", b"c"])}


def test_what_cannot_be_a_tensor(ensemble, tensorrt_llm):
    # Triton's text.
    with pytest.raises(InvalidTensorError, match=r"^The schema can not convert input 'max_tokens'"):
        decode(ensemble, max_tokens=[{"a": 1}])
    # Triton's text.
    with pytest.raises(InvalidTensorError, match="can not convert"):
        decode(ensemble, max_tokens=functools.reduce(lambda nested, _: [nested], range(200), 1))
    # Triton's text.
    with pytest.raises(InvalidTensorError, match=r"^Converting keyword: 'parameters': The schema"):
        decode(tensorrt_llm, parameters={"stop_words_list": [1, 2, 3]})
    with refused(InvalidTensorError, "max_tokens", 5, param="max_tokens"):
        decode(ensemble, max_tokens="5")
    # Triton's text.
    with pytest.raises(InvalidTensorError, match="receiving FP16 data via JSON is not supported"):
        decode(tensorrt_llm, lora_weights=[1.0])


def test_what_cannot_be_a_parameter(ensemble):
    # Triton's text.
    with pytest.raises(InvalidRequestError, match=r"^parameter 'x' has invalid type"):
        decode(ensemble, x=[1])
    # Triton's text.
    with pytest.raises(InvalidRequestError, match=r"^Converting keyword: 'parameters': parameter"):
        decode(ensemble, parameters={"x": None})
    # Triton's text.
    with pytest.raises(InvalidRequestError, match="Expected JSON object for keyword: 'parameters'"):
        decode(ensemble, parameters=[1])
    with refused(InvalidRequestError, "id", "int", param="id"):
        decode(ensemble, id=5)


def test_one_element_is_a_scalar():
    response = InferResponse(
        model="m",
        version="1",
        request_id="",
        outputs=(strings("a", ["x"]), numbers("b", "INT32", [[1, 2]]), numbers("c", "INT32", [])),
        parameters={"p": 1},
    )
    assert encode_generate(response) == {
        "model_name": "m",
        "model_version": "1",
        "p": 1,
        "a": "x",
        "b": [1, 2],
        "c": [],
    }
