"""POST /classify: every shape of input, conversations, labels, and every refusal."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import RateLimitedError
from loraplex.core.task import Pool, PoolActivation, PoolKind
from loraplex.frontends.openai import openai_routes
from loraplex.frontends.openai.pooled import MAX_INPUTS
from loraplex.frontends.openai.writers import DIGESTS_HEADER
from support.byte_tokenizer import BYTE_TOKENIZER, PAD_TOKEN_ID
from support.echo_service import EchoService
from support.served import served

SCORES = Pool(PoolKind.SCORE, normalize=False)
PROBABILITIES = Pool(PoolKind.SCORE, activation=PoolActivation.SOFTMAX, normalize=False)


def set_classes(backend: EchoService, **fields: Any) -> None:
    model = backend.model("echo")
    model.card = msgspec.structs.replace(model.card, classes=ClassFormat(**fields))


@pytest.fixture
def backend() -> EchoService:
    """A model with a head, and an adapter."""
    service = EchoService()
    service.register("fr")
    set_classes(service, num_labels=3)
    return service


@pytest.fixture
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as address, httpx.Client(base_url=address, timeout=None) as client:
        yield client


def classify(http: httpx.Client, path: str = "/classify", **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    assert [entry["index"] for entry in result["data"]] == list(range(len(result["data"])))
    return result


def probs_of(http: httpx.Client, **body: Any) -> list[list[float]]:
    return [entry["probs"] for entry in classify(http, **body)["data"]]


def test_the_form_of_vllm(http, backend) -> None:
    result = classify(http, model="echo", input=["one", "two!"], user="u")
    num_tokens = sum(len(BYTE_TOKENIZER.encode(text, True)) for text in ("one", "two!"))
    assert result["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert result["id"].startswith("classify-")
    assert (result["object"], result["model"]) == ("list", "echo")
    assert isinstance(result["created"], int)
    for entry in result["data"]:
        assert set(entry) == {"index", "label", "probs", "num_classes"}
        best = max(range(entry["num_classes"]), key=entry["probs"].__getitem__)
        assert entry["label"] == f"LABEL_{best}"
        assert len(entry["probs"]) == entry["num_classes"]
    assert backend.requests[-1].task == PROBABILITIES
    names = tuple(f"class {index}" for index in range(result["data"][0]["num_classes"]))
    set_classes(backend, num_labels=len(names), labels=names, activation=PoolActivation.SIGMOID)
    named = classify(http, "/v1/classify", input="one")["data"][0]
    assert named["label"] == result["data"][0]["label"].replace("LABEL_", "class ")
    assert backend.requests[-1].task == msgspec.structs.replace(
        PROBABILITIES, activation=PoolActivation.SIGMOID
    )
    classify(http, input="one", use_activation=False)
    assert backend.requests[-1].task == SCORES


def test_four_shapes_of_input_and_adapters(http) -> None:
    ids = BYTE_TOKENIZER.encode("one", True)
    [text] = probs_of(http, input="one")
    assert probs_of(http, input=["one"]) == [text]
    assert probs_of(http, input=ids) == [text]
    assert probs_of(http, input=[ids, ids[:2]])[0] == text
    assert probs_of(http, input="one", add_special_tokens=False) != [text]
    plain, french = probs_of(http, input=["one", "one"], lora_path=[None, "fr"])
    assert plain == text != french
    assert probs_of(http, input="one", model="fr") == [french]
    response = http.post("/classify", json={"input": "one"}, headers={"x-lora-adapter": "fr"})
    assert response.json()["data"][0]["probs"] == french
    assert response.headers[DIGESTS_HEADER]


def test_a_conversation_is_one_text(http, backend) -> None:
    messages = [{"role": "user", "content": "one"}]
    [rendered] = probs_of(http, messages=messages)
    assert backend.requests[-1].prompt == "<s>user: one\n"
    assert not backend.requests[-1].add_special_tokens
    assert probs_of(http, input="<s>user: one\n", add_special_tokens=False) == [rendered]
    classify(http, messages=messages, add_generation_prompt=True, add_special_tokens=True)
    assert backend.requests[-1].prompt == "<s>user: one\nassistant: "
    assert backend.requests[-1].add_special_tokens


def test_padding_at_the_end_is_not_classified(http, backend) -> None:
    set_classes(backend, num_labels=3, pad_token_id=PAD_TOKEN_ID)
    ids = BYTE_TOKENIZER.encode("one", True)
    padded = classify(http, input=[[*ids, PAD_TOKEN_ID, PAD_TOKEN_ID]])
    assert padded["data"][0]["probs"] == probs_of(http, input=[ids])[0]
    assert padded["usage"]["prompt_tokens"] == len(ids)
    inner = [PAD_TOKEN_ID, *ids]
    assert classify(http, input=[inner])["usage"]["prompt_tokens"] == len(inner)
    assert classify(http, input=[[PAD_TOKEN_ID] * 3])["usage"]["prompt_tokens"] == 1


def test_longer_texts_are_cut(http) -> None:
    cut = probs_of(http, input="abcdef", truncate_prompt_tokens=4)
    assert cut == probs_of(http, input="abc")
    left = probs_of(http, input="abcdef", truncate_prompt_tokens=4, truncation_side="left")
    assert left == probs_of(http, input="def")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "either input or messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "input", "either input or messages"),
        ({"input": {"a": 1}}, "input", "a string, a list of strings"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [99_999]}, "input", "99999 is out of the vocabulary"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "at most 2048"),
        ({"input": "a" * 5000}, "input", "tokens"),
        ({"input": None, "messages": []}, "messages", "at least one message"),
        (
            {"input": None, "messages": [{"role": "user", "content": "a" * 5000}]},
            "messages",
            "tokens",
        ),
        ({"add_generation_prompt": True}, "messages", "add_generation_prompt"),
        ({"chat_template_kwargs": {}}, "messages", "chat_template_kwargs"),
        ({"model": "nothing"}, "model", "nothing"),
        ({"lora_model": "nothing"}, "lora_model", "nothing"),
        ({"dimensions": 3}, "dimensions", "no field 'dimensions'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"priority": 2**40}, "priority", "priority"),
        ({"use_activation": "yes please"}, "use_activation", "true or false"),
    ],
)
def test_refusals(http, fields, param, words) -> None:
    response = http.post("/classify", json={"input": "a", **fields})
    error = response.json()["error"]
    assert response.status_code in (400, 404), response.text
    assert error["param"] == param, error
    assert words in error["message"], error


def test_a_model_without_a_head(http, backend) -> None:
    assert http.get("/v1/models/echo").json()["capabilities"]["classification"]
    assert http.get("/v1/models/echo").json()["num_labels"] == 3
    set_classes(backend)
    for model in ("echo", "fr"):
        error = http.post("/classify", json={"input": "a", "model": model}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_feature", "model")
        assert repr(model) in error["message"]
    entry = http.get("/v1/models/echo").json()
    assert not entry["capabilities"]["classification"]
    assert "num_labels" not in entry


def test_a_function_that_is_not_computed(http, backend) -> None:
    set_classes(backend, num_labels=3, problem="its activation function Squash is not computed")
    error = http.post("/classify", json={"input": "a"}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_feature", "use_activation")
    assert "Squash" in error["message"]
    assert probs_of(http, input="a", use_activation=False)


def test_errors_of_admission_fail_all_texts(http, backend) -> None:
    backend.plant(RateLimitedError("slow down"))
    response = http.post("/classify", json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert probs_of(http, input="a")
