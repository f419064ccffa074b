"""POST /v1/embeddings: the official client, both encodings, every shape of input, every refusal;
and vectors in the forms of TEI, Cohere and vLLM.
"""

import array
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from starlette.applications import Starlette

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import PromptTooLongError, RateLimitedError
from loraplex.core.request import PromptTruncation, TruncationSide
from loraplex.core.score_format import ScoreFormat, ScoreKind
from loraplex.core.task import Pool, PoolKind
from loraplex.core.vector_format import TextPrompts, VectorFormat
from loraplex.frontends.openai import openai_routes
from loraplex.frontends.openai.embeddings import MAX_INPUTS
from loraplex.frontends.openai.writers import DIGESTS_HEADER
from support.byte_tokenizer import BYTE_TOKENIZER
from support.echo_runner import ECHO_SIZE
from support.echo_service import EchoService
from support.served import served

PATH = "/v1/embeddings"


@pytest.fixture
def backend() -> EchoService:
    service = EchoService()
    service.register("fr")
    return service


@pytest.fixture
def url(backend: EchoService) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=None) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors_of(http: httpx.Client, **body: Any) -> list[list[float]]:
    response = http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    entries = response.json()["data"]
    assert [entry["index"] for entry in entries] == list(range(len(entries)))
    return [entry["embedding"] for entry in entries]


def test_the_official_client_reads_what_it_requests(client, backend) -> None:
    both = client.embeddings.create(model="echo", input=["one", "two!"])
    assert [item.index for item in both.data] == [0, 1]
    assert [len(item.embedding) for item in both.data] == [ECHO_SIZE] * 2
    num_tokens = sum(len(BYTE_TOKENIZER.encode(text, True)) for text in ("one", "two!"))
    assert (both.usage.prompt_tokens, both.usage.total_tokens) == (num_tokens, num_tokens)
    assert (both.object, both.model, both.data[0].object) == ("list", "echo", "embedding")
    numbers = client.embeddings.create(model="echo", input="one", encoding_format="float")
    assert numbers.data[0].embedding == both.data[0].embedding
    adapted = client.embeddings.create(model="fr", input="one", dimensions=3, user="u")
    assert len(adapted.data[0].embedding) == 3
    assert adapted.data[0].embedding != both.data[0].embedding[:3]
    assert adapted.model == "fr"
    assert [request.task for request in backend.requests[-2:]] == [Pool(), Pool(dimensions=3)]


def test_base64_is_float32_in_little_endian(http) -> None:
    [text] = vectors_of(http, input="one", encoding_format="base64")
    [numbers] = vectors_of(http, input="one")
    assert isinstance(text, str)
    assert array.array("f", base64.b64decode(text)).tolist() == numbers


def test_four_shapes_of_input_and_what_stands_before_texts(http, backend) -> None:
    ids = BYTE_TOKENIZER.encode("one", True)
    [text] = vectors_of(http, input="one")
    assert vectors_of(http, input=["one"]) == [text]
    assert vectors_of(http, input=ids) == [text]
    assert vectors_of(http, input=[ids, ids[:2]])[0] == text
    model = backend.model("echo")
    prompts = {"query": "Q: ", "document": ""}
    format_ = VectorFormat(kind=PoolKind.MEAN, prompts=TextPrompts(prompts, "query"))
    model.card = msgspec.structs.replace(model.card, vectors=format_)
    whole = [BYTE_TOKENIZER.encode(text, True) for text in ("Q: one", "Q: two")]
    assert vectors_of(http, input=["one", "two"]) == vectors_of(http, input=whole)
    assert backend.requests[-1].task == Pool(PoolKind.MEAN)
    assert vectors_of(http, input="one", prompt_name="document") == vectors_of(http, input=ids)
    unknown = http.post(PATH, json={"input": [ids], "prompt_name": "passage"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "prompt_name")
    vectors_of(http, input="one", prompt_name="document", normalize=False)
    assert backend.requests[-1].task == Pool(PoolKind.MEAN, normalize=False)
    vectors_of(http, input=[ids])
    assert backend.requests[-1].prompt == tuple(ids), "token ids are as they are"


def test_adapters_by_text_header_and_scale(http, backend) -> None:
    plain, french = vectors_of(http, input=["one", "one"], lora_path=[None, "fr"])
    assert plain != french
    assert vectors_of(http, input="one", lora_model="fr") == [french]
    response = http.post(PATH, json={"input": "one"}, headers={"x-lora-adapter": "fr"})
    assert response.json()["data"][0]["embedding"] == french
    assert response.headers[DIGESTS_HEADER]
    half = vectors_of(http, input="one", adapters=[{"name": "fr", "scale": 0.5}])
    assert half not in ([plain], [french])


def test_the_most_texts_and_one_more(http) -> None:
    vectors = vectors_of(http, input=["a", "b"] * (MAX_INPUTS // 2), dimensions=1)
    assert len(vectors) == MAX_INPUTS
    assert vectors[::2] == [vectors[0]] * (MAX_INPUTS // 2)
    response = http.post(PATH, json={"input": ["a"] * (MAX_INPUTS + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("input has 2049 inputs; at most 2048")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "a list of token ids or a list of such lists"),
        ({"input": {"a": 1}}, "input", "a string, a list of strings"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ""}, "input", "input[0] is empty"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[]]}, "input", "input[0] is empty"),
        ({"input": [99_999]}, "input", "99999 is out of the vocabulary"),
        ({"input": "a" * 5000}, "input", "tokens"),
        ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"dimensions": 0}, "dimensions", "[1, "),
        ({"dimensions": ECHO_SIZE + 1}, "dimensions", "at most 16"),
        ({"prompt_name": "query"}, "prompt_name", "known: none"),
        ({"normalize": True, "use_activation": False}, "use_activation", "another name"),
        ({"model": "nothing"}, "model", "nothing"),
        ({"lora_model": "nothing"}, "lora_model", "nothing"),
        ({"temperature": 0.5}, "temperature", "no field 'temperature'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
        ({"priority": 2**40}, "priority", "priority"),
    ],
)
def test_refusals(http, fields, param, words) -> None:
    response = http.post(PATH, json={"input": "a", **fields})
    error = response.json()["error"]
    assert response.status_code in (400, 404), response.text
    assert error["param"] == param, error
    assert words in error["message"], error


def test_what_the_folder_says_and_is_not_computed(http, backend) -> None:
    model = backend.model("echo")
    format_ = VectorFormat(problem="the module Dense of modules.json is not computed")
    model.card = msgspec.structs.replace(model.card, vectors=format_)
    error = http.post(PATH, json={"input": "a"}).json()["error"]
    assert (error["code"], "Dense" in error["message"]) == ("unsupported_feature", True)
    assert not http.get("/v1/models/echo").json()["capabilities"]["embeddings"]
    model.card = msgspec.structs.replace(model.card, vectors=VectorFormat(max_tokens=4))
    error = http.post(PATH, json={"input": "abcdef"}).json()["error"]
    assert (error["param"], "max_seq_length" in error["message"]) == ("input", True)
    vectors_of(http, input="abcdef", truncate_prompt_tokens=-1)


def test_longer_texts_are_cut_between_the_tokenizers_own_tokens(http, backend) -> None:
    before, after = backend.model("echo").num_special_tokens
    assert (before, after) == (1, 0)
    for side, left in ((None, "abc"), ("right", "abc"), ("left", "def")):
        cut = vectors_of(http, input="abcdef", truncate_prompt_tokens=4, truncation_side=side)
        assert cut == vectors_of(http, input=left)
    ids = BYTE_TOKENIZER.encode("abcdef", True)
    cut = vectors_of(http, input=[ids], truncate_prompt_tokens=4)
    assert cut == vectors_of(http, input=[ids[:4]])
    response = http.post(PATH, json={"input": "abcdef", "truncate_prompt_tokens": 1})
    assert "at least 2 are needed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RateLimitedError("slow down"), "rate_limit_exceeded"),
        (PromptTooLongError("long"), "context_length_exceeded"),
    ],
)
def test_errors_of_admission_are_in_openais_form(client, backend, error, code) -> None:
    backend.plant(error)
    with pytest.raises(openai.APIStatusError) as raised:
        client.embeddings.create(model="echo", input=["a", "b"])
    assert raised.value.code == code
    assert client.embeddings.create(model="echo", input="a").data


def test_vectors_and_their_length_in_the_form_of_tei(http, backend) -> None:
    [both] = vectors_of(http, input="one", normalize=True)
    assert http.post("/embed", json={"inputs": "one"}).json() == [both]
    several = http.post("/embed", json={"inputs": ["one", "two"], "dimensions": 3}).json()
    assert [len(vector) for vector in several] == [3, 3]
    assert backend.requests[-1].task == Pool(dimensions=3)
    http.post("/embed", json={"inputs": "one", "normalize": False})
    assert backend.requests[-1].task == Pool(normalize=False)
    long = {"inputs": "a" * 5000}
    assert http.post("/embed", json=long).status_code == 400
    left = {"truncate": True, "truncation_direction": "Left"}
    assert http.post("/embed", json={**long, **left}).status_code == 200
    assert backend.requests[-1].truncation == PromptTruncation(None, TruncationSide.LEFT)


def test_labels_in_the_form_of_tei(http, backend) -> None:
    model = backend.model("echo")
    classes = ClassFormat(num_labels=1, labels=("good",))
    model.card = msgspec.structs.replace(model.card, classes=classes)
    [one] = http.post("/predict", json={"inputs": "a", "raw_scores": True}).json()
    assert one["label"] == "good"
    assert backend.requests[-1].task == Pool(PoolKind.SCORE, normalize=False)
    lists = http.post("/predict", json={"inputs": [["a"], ["b"]], "raw_scores": True}).json()
    assert lists[0] == [one]
    assert len(lists) == 2
    error = http.post("/predict", json={"inputs": [["a", "b"]]}).json()["error"]
    assert (error["param"], "/rerank" in error["message"]) == ("inputs", True)


def test_vectors_by_type_in_the_form_of_cohere(http, backend) -> None:
    model = backend.model("echo")
    prompts = TextPrompts({"query": "Q: ", "passage": "P: "})
    model.card = msgspec.structs.replace(model.card, vectors=VectorFormat(prompts=prompts))
    types = ["float", "base64", "binary", "ubinary"]
    body = {"texts": ["one"], "input_type": "search_document", "embedding_types": types}
    reply = http.post("/v2/embed", json=body).json()
    [vector] = reply["embeddings"]["float"]
    assert [vector] == vectors_of(http, input="P: one")
    [text] = reply["embeddings"]["base64"]
    assert array.array("f", base64.b64decode(text)).tolist() == vector
    [unsigned], [signed] = reply["embeddings"]["ubinary"], reply["embeddings"]["binary"]
    bits = "".join(f"{byte:08b}" for byte in unsigned)
    assert [bit == "1" for bit in bits] == [value > 0 for value in vector]
    assert signed == [byte - 128 for byte in unsigned]
    assert (reply["texts"], reply["response_type"]) == (["one"], "embeddings_by_type")
    query = {"texts": ["one"], "input_type": "search_query", "output_dimension": 4}
    [short] = http.post("/v2/embed", json=query).json()["embeddings"]["float"]
    assert [short] == vectors_of(http, input="Q: one", dimensions=4)
    long = {"texts": ["a" * 5000]}
    assert http.post("/v2/embed", json=long).status_code == 200, "END is the default"
    assert http.post("/v2/embed", json={**long, "truncate": "NONE"}).status_code == 400
    http.post("/v2/embed", json={**long, "truncate": "START", "max_tokens": 7})
    assert backend.requests[-1].truncation == PromptTruncation(7, TruncationSide.LEFT)


def test_vectors_and_labels_in_the_form_of_pooling(http, backend) -> None:
    reply = http.post("/pooling", json={"input": ["one", "two"], "task": "embed"}).json()
    assert [entry["data"] for entry in reply["data"]] == vectors_of(http, input=["one", "two"])
    assert (reply["object"], reply["data"][1]["object"]) == ("list", "pooling")
    model = backend.model("echo")
    model.card = msgspec.structs.replace(model.card, classes=ClassFormat(num_labels=1))
    body = {"input": "one", "task": "classify", "use_activation": False}
    [entry] = http.post("/pooling", json=body).json()["data"]
    assert len(entry["data"]) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/pooling", {"input": "a", "task": "token_embed"}, "task", "embed and classify"),
        ("/pooling", {"input": "a", "task": "classify", "dimensions": 2}, "dimensions", "embed"),
        ("/embed", {"inputs": []}, "inputs", "empty list"),
        ("/embed", {"inputs": ["a", ""]}, "inputs", "inputs[1]"),
        ("/embed", {"inputs": 1}, "inputs", "a string or a list of strings"),
        ("/embed", {"inputs": "a", "prompt_name": "q"}, "prompt_name", "known: none"),
        (
            "/embed",
            {"inputs": "a", "truncate": True, "truncate_prompt_tokens": 3},
            "truncate",
            "not both",
        ),
        ("/predict", {"inputs": "a"}, "model", "no classification head"),
        ("/v2/embed", {"texts": []}, "texts", "empty list"),
        ("/v2/embed", {"texts": ["a"], "images": ["x"]}, "images", "only texts"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type", "search_query"),
        (
            "/v2/embed",
            {"texts": ["a"], "embedding_types": ["int8"]},
            "embedding_types[0]",
            "binary",
        ),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 99}, "output_dimension", "at most 16"),
        (
            "/v2/embed",
            {"texts": ["a"], "max_tokens": 3, "truncate": "NONE"},
            "max_tokens",
            "START or END",
        ),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens", "max_tokens leaves 0"),
    ],
)
def test_refusals_of_other_forms(http, path, fields, param, words) -> None:
    response = http.post(path, json=fields)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["param"], words in error["message"]) == (param, True), error


def test_a_mean_without_the_prompt_needs_a_token_after_it(http, backend) -> None:
    model = backend.model("echo")
    prompts = TextPrompts({"query": "Find: "})
    vectors = VectorFormat(kind=PoolKind.MEAN, prompts=prompts, includes_prompts=False)
    model.card = msgspec.structs.replace(model.card, vectors=vectors)
    num_left_out = len(BYTE_TOKENIZER.encode("Find: ", True))
    body = {"input": "abc", "prompt_name": "query", "truncate_prompt_tokens": num_left_out + 1}
    assert http.post(PATH, json=body).status_code == 200
    error = http.post(PATH, json=body | {"truncate_prompt_tokens": num_left_out}).json()["error"]
    assert error["param"] == "input"
    assert str(num_left_out) in error["message"]
    ids = {"input": [1], "prompt_name": "query"}
    assert http.post(PATH, json=ids).status_code == 200, "ids are as the client made them"


def test_what_a_model_is_for_in_the_form_of_tei(http, backend) -> None:
    info = http.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert (info["model_id"], info["model_dtype"]) == ("echo", backend.model("echo").card.dtype)
    assert (info["max_input_length"], info["max_client_batch_size"]) == (4096, MAX_INPUTS)
    model = backend.model("echo")
    card = model.card
    limits = VectorFormat(kind=PoolKind.MEAN, max_tokens=128)
    model.card = msgspec.structs.replace(card, vectors=limits)
    info = http.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 128
    labels = ClassFormat(num_labels=2, labels=("good", "bad"))
    model.card = msgspec.structs.replace(card, classes=labels)
    assert http.get("/info").json()["model_type"] == {
        "classifier": {"id2label": {"0": "good", "1": "bad"}, "label2id": {"good": 0, "bad": 1}}
    }
    judges = ScoreFormat(kind=ScoreKind.TOKENS, token_ids=(1, 2))
    model.card = msgspec.structs.replace(card, scores=judges)
    assert list(http.get("/info").json()["model_type"]) == ["reranker"]


def test_langchains_embeddings(url) -> None:
    from langchain_openai import OpenAIEmbeddings  # it takes long, and others do not need it

    embeddings = OpenAIEmbeddings(
        model="fr", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["one", "two"])
    assert len(first) == len(second) == ECHO_SIZE
    assert embeddings.embed_query("one") == first != second
