"""/score, /rerank and their forms: every way to name the texts, every reply, every refusal."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import RateLimitedError
from loraplex.core.request import PromptTruncation, TruncationSide
from loraplex.core.score_format import PairTemplate, ScoreFormat, ScoreKind, sigmoid
from loraplex.core.task import Pool, PoolKind
from loraplex.core.vector_format import TextPrompts, VectorFormat
from loraplex.frontends.openai import openai_routes
from loraplex.frontends.openai.pooled import MAX_INPUTS
from loraplex.frontends.openai.scoring import probabilities
from loraplex.frontends.openai.writers import DIGESTS_HEADER
from loraplex.serving import scoring
from support.byte_tokenizer import BYTE_TOKENIZER
from support.described_app import described_app
from support.echo_service import EchoService
from support.served import served

CLIENTS = Path(sys.prefix) / "clients"
"""Folder of the packages that `make .venv/clients` installs apart from loraplex."""
PROGRAM = Path(__file__).parent / "cohere_program.py"
VECTORS = ScoreFormat(kind=ScoreKind.VECTORS)
JUDGES = ScoreFormat(
    kind=ScoreKind.TOKENS,
    token_ids=(89, 78),
    template=PairTemplate.of("{instruction}<{query}|{document}>"),
    instruction="i",
)


def let_score(service: EchoService, **formats: Any) -> None:
    model = service.model("echo")
    model.card = msgspec.structs.replace(model.card, **formats)


@pytest.fixture
def backend() -> EchoService:
    service = EchoService()
    service.register("fr")
    let_score(service, scores=JUDGES)
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


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def scores_of(http: httpx.Client, **body: Any) -> list[float]:
    reply = post(http, "/score", **body)
    assert [entry["index"] for entry in reply["data"]] == list(range(len(reply["data"])))
    return [entry["score"] for entry in reply["data"]]


def test_names_of_the_texts_and_one_query_for_all(http, backend) -> None:
    found = scores_of(http, queries="q", documents=["a", "b"])
    assert [request.prompt for request in backend.requests] == ["i<q|a>", "i<q|b>"]
    assert backend.requests[0].task == Pool(PoolKind.LOGITS, normalize=False, token_ids=(89, 78))
    assert not backend.requests[0].add_special_tokens
    assert all(0 < score < 1 for score in found)
    for first, second in (("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
        assert scores_of(http, **{first: ["q"], second: ["a", "b"]}) == found
    assert scores_of(http, queries=["q", "q"], documents=["b", "a"]) == found[::-1]
    raw = scores_of(http, queries="q", documents=["a", "b"], use_activation=False)
    assert list(map(sigmoid, raw)) == pytest.approx(found)
    scores_of(http, queries="q", documents="a", instruction="other ")
    assert backend.requests[-1].prompt == "other <q|a>"
    reply = post(http, "/v1/score", text_1="q", text_2="a", model="echo")
    assert (reply["object"], reply["model"], reply["data"][0]["object"]) == (
        "list",
        "echo",
        "score",
    )
    num_tokens = len(BYTE_TOKENIZER.encode("i<q|a>", False))
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_cosines_are_of_one_vector_for_each_text_with_its_prompt(http, backend) -> None:
    prompts = {"query": "Q: ", "passage": "P: "}
    let_score(backend, scores=VECTORS, vectors=VectorFormat(prompts=TextPrompts(prompts)))
    found = scores_of(http, queries="a", documents=["a", "b", "a"])
    sent = ["Q: a", "P: a", "P: b"]
    assert [request.prompt for request in backend.requests] == ["a", "a", "b"]
    reply = post(http, "/v1/embeddings", input=sent)
    query, first, second = (np.array(entry["embedding"]) for entry in reply["data"])
    assert found == pytest.approx([query @ first, query @ second, query @ first])
    assert scores_of(http, queries="a", documents="a", use_activation=False) == found[:1]


def test_a_reranking_and_its_forms(http, backend) -> None:
    texts = ["one", "two", "three", "four"]
    scores = scores_of(http, queries="q", documents=texts)
    order = sorted(range(4), key=lambda at: -scores[at])
    documents = [texts[0], {"text": texts[1]}, *texts[2:]]
    for path in ("/rerank", "/v1/rerank"):
        reply = post(http, path, query="q", documents=documents, top_n=0)
        assert [result["index"] for result in reply["results"]] == order
        for result in reply["results"]:
            assert result["relevance_score"] == scores[result["index"]]
            assert result["document"] == {"text": texts[result["index"]]}
        assert set(reply) == {"id", "model", "usage", "results"}
    bare = post(http, "/rerank", query="q", documents=texts, top_n=2, return_documents=False)
    assert [set(each) for each in bare["results"]] == [{"index", "relevance_score"}] * 2
    cohere = post(http, "/v2/rerank", query="q", documents=texts, top_n=1, model="echo")
    assert cohere["results"] == [{"index": order[0], "relevance_score": max(scores)}]
    assert set(cohere) == {"id", "results", "meta"}
    assert cohere["meta"]["tokens"]["input_tokens"] > 0
    tei = post(http, "/rerank", query="q", texts=texts)
    assert tei == [{"index": at, "score": scores[at]} for at in order]
    raw = post(http, "/rerank", query="q", texts=texts, raw_scores=True, return_text=True)
    assert [(each["index"], each["text"]) for each in raw] == [(at, texts[at]) for at in order]
    assert [sigmoid(each["score"]) for each in raw] == pytest.approx([scores[at] for at in order])


def test_a_document_is_cut_and_what_follows_it_stays(http, backend) -> None:
    def served_tokens(**body: Any) -> str:
        reply = post(http, "/rerank", query="q", return_documents=False, **body)
        return str(reply["usage"]["prompt_tokens"])

    assert served_tokens(documents=["abcdef"], max_tokens_per_doc=2) == str(len("i<q|ab>"))
    kept = len("i<q|"), len(">")
    right = TruncationSide.RIGHT
    assert backend.requests[-1].truncation == PromptTruncation(None, right, kept, 2)
    long = ["a" * 5000]
    assert served_tokens(documents=long, truncate_prompt_tokens=-1) == "4096"
    assert served_tokens(documents=["abcdef"], truncate_prompt_tokens=8) == "8"
    post(http, "/v2/rerank", query="q", documents=long)
    assert http.post("/rerank", json={"query": "q", "documents": long}).status_code == 400
    post(http, "/rerank", query="q", texts=long, truncate=True, truncation_direction="Left")
    assert backend.requests[-1].truncation == PromptTruncation(None, TruncationSide.LEFT, kept)
    left = PromptTruncation(8, TruncationSide.LEFT, kept)
    eight: dict[str, Any] = {"texts": long, "truncate_prompt_tokens": 8}
    post(http, "/rerank", query="q", truncation_direction="left", **eight)
    assert backend.requests[-1].truncation == left
    post(http, "/rerank", query="q", texts=long, truncate=True, truncation_side="left")
    assert backend.requests[-1].truncation == PromptTruncation(None, TruncationSide.LEFT, kept)
    cut = scores_of(http, queries="q", documents="abcdef", max_tokens_per_doc=3)
    assert cut == scores_of(http, queries="q", documents="abc")


def test_a_pair_of_the_tokenizer_for_a_head_of_the_model_or_of_an_adapter(http, backend) -> None:
    let_score(backend, scores=ScoreFormat(), classes=ClassFormat(num_labels=1))
    [score] = scores_of(http, queries="q", documents="a")
    pair = BYTE_TOKENIZER.encode_pair("q", "a")
    assert backend.requests[-1].prompt == tuple(pair.token_ids)
    assert (backend.requests[-1].task.kind, 0 < score < 1) == (PoolKind.SCORE, True)
    cut = scores_of(http, queries="q", documents="abc", max_tokens_per_doc=1)
    assert cut == [score]
    adapted = post(http, "/score", queries="q", documents="a", model="fr")
    assert adapted["data"][0]["score"] != score


def test_adapters_and_their_digests(http) -> None:
    plain = scores_of(http, queries="q", documents="a")
    response = http.post("/score", json={"queries": "q", "documents": "a", "lora_model": "fr"})
    assert response.json()["data"][0]["score"] != plain[0]
    assert response.headers[DIGESTS_HEADER]


def test_probabilities_of_labels_in_sglangs_form(http, backend) -> None:
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [65, 66, 67]}
    reply = post(http, "/v1/score", **body)
    assert (reply["object"], reply["model"]) == ("scoring", "echo")
    assert [request.prompt for request in backend.requests] == ["qa", "qb"]
    assert backend.requests[0].task == Pool(
        PoolKind.LOGITS, normalize=False, token_ids=(65, 66, 67), is_logprobs=True
    )
    shares = np.array(post(http, "/v1/score", apply_softmax=True, **body)["scores"])
    assert shares.sum(1) == pytest.approx([1, 1])
    values = np.array(reply["scores"])
    assert shares == pytest.approx(values / values.sum(1, keepdims=True))
    post(http, "/score", item_first=True, **body)
    assert [request.prompt for request in backend.requests[-2:]] == ["aq", "bq"]
    post(http, "/score", query=[65, 66], items=[[67], [68]], label_token_ids=[1])
    assert [request.prompt for request in backend.requests[-2:]] == [(65, 66, 67), (65, 66, 68)]


def test_shares_of_tokens_that_are_almost_impossible() -> None:
    pooled = np.array([-200.0, -200.0], "<f4").tobytes()
    assert probabilities([pooled], is_share=True) == [[0.5, 0.5]]
    assert probabilities([pooled], is_share=False) == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/score", {}, "documents", "give queries and documents"),
        ("/score", {"queries": "a"}, "documents", "text_1 and text_2"),
        ("/score", {"queries": "a", "documents": []}, "documents", "empty list"),
        ("/score", {"queries": "a", "documents": ["b", ""]}, "documents", "documents[1]"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "queries", "2 texts for 3"),
        ("/score", {"queries": "a", "documents": "b", "text_1": "c"}, "text_1", "does not go"),
        ("/score", {"queries": "a", "documents": "b", "top_n": 1}, "top_n", "no field"),
        ("/score", {"queries": "a", "items": "b", "item_first": True}, "item_first", "not go"),
        ("/score", {"query": "a", "items": "b"}, "documents", "give queries"),
        ("/score", {"queries": "a", "items": [[1]]}, "items[0]", "token ids are for query"),
        ("/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items", "is empty"),
        ("/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items", "all be"),
        ("/score", {"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids", "1 or"),
        (
            "/score",
            {"query": "a", "items": "b", "label_token_ids": [999]},
            "label_token_ids",
            "999 is out of the vocabulary",
        ),
        ("/rerank", {"documents": ["a"]}, "query", "required"),
        ("/rerank", {"query": "a"}, "documents", "query and texts"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "query[0]"),
        ("/rerank", {"query": "a", "documents": [1]}, "documents[0]", "an object with a text"),
        ("/rerank", {"query": "a", "documents": [{"t": "b"}]}, "documents[0]", "the fields t"),
        ("/rerank", {"query": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, "documents", "2049"),
        ("/rerank", {"query": "a", "texts": ["b"], "top_n": 1}, "top_n", "query and texts"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncate": True}, "truncate", "not go"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0},
            "max_tokens_per_doc",
            "at least 1, got 0",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_query": 3},
            "max_tokens_per_query",
            "max_tokens_per_doc",
        ),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "one"),
        ("/rerank", {"query": "a", "documents": ["b"], "lora_model": "no"}, "lora_model", "no"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "no"}, "model", "no"),
        ("/v2/rerank", {"query": "a", "documents": "b"}, "documents", "a list of strings"),
    ],
)
def test_refusals(http, path, fields, param, words) -> None:
    response = http.post(path, json=fields)
    error = response.json()["error"]
    assert response.status_code in (400, 404), response.text
    assert error["param"] == param, error
    assert words in error["message"], error


@pytest.mark.parametrize("joins", ["tokenizer", "template"])
def test_many_short_pairs_do_not_hold_up_the_event_loop(http, backend, monkeypatch, joins) -> None:
    """What stands around documents is tokenized for each query, however short the queries are."""
    if joins == "tokenizer":
        let_score(backend, scores=ScoreFormat(), classes=ClassFormat(num_labels=1))
    name = {"tokenizer": "tokenize_pair", "template": "tokenize"}[joins]
    tokenize = getattr(backend.model("echo"), name)
    on_loop: list[bool] = []

    def watched(*texts: str, **arguments: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return tokenize(*texts, **arguments)

    monkeypatch.setattr(type(backend.model("echo")), name, lambda _, *a, **k: watched(*a, **k))
    post(http, "/score", queries=["a"], documents=["b"], max_tokens_per_doc=5)
    assert on_loop, "tokenized"
    assert all(on_loop), "a thread would cost more than one pair"
    on_loop.clear()
    queries = [f"{number:04}" for number in range(1000)]
    post(http, "/score", queries=queries, documents=["b"] * 1000, max_tokens_per_doc=5)
    assert len(on_loop) >= 1000
    assert not any(on_loop)


def test_what_all_prompts_repeat_has_a_limit(http, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "MAX_REPEATED", 8)
    post(http, "/rerank", query="abcd", documents=["a", "b"], instruction="abcd")
    post(http, "/score", query="abcd", items=["a", "b"], label_token_ids=[1])
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("/rerank", {"query": "abcd", "documents": ["a"] * 3}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2, "instruction": "abcde"}, "instruction"),
        ("/score", {"text_1": "abcde", "text_2": ["a", "b"]}, "text_1"),
        ("/score", {"query": [1] * 5, "items": [[1], [2]], "label_token_ids": [1]}, "query"),
    ]
    for path, body, param in refused:
        response = http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param, error
        assert "is repeated in the prompt of each document: " in error["message"]


def test_what_the_folder_does_not_state(http, backend) -> None:
    body = {"queries": "a", "documents": "b"}
    let_score(backend, scores=ScoreFormat(problem="no function"))
    for model in ("echo", "fr"):
        error = http.post("/score", json={**body, "model": model}).json()["error"]
        assert "no function" in error["message"], "an adapter does not change this"
    let_score(backend, scores=ScoreFormat(problem="nothing is known", wants_head=True))
    error = http.post("/score", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_feature", "model")
    assert "nothing is known" in error["message"]
    error = http.post("/score", json={**body, "model": "fr"}).json()["error"]
    assert "no classification head" in error["message"], "an adapter may have one"
    let_score(backend, scores=ScoreFormat(kind=ScoreKind.TOKENS, token_ids=(1,), renders=True))
    error = http.post("/score", json=body).json()["error"]
    assert "chat template makes no prompt of a query" in error["message"]
    for form, reason in ((VECTORS, "of one text"), (ScoreFormat(), "no place")):
        let_score(backend, scores=form, classes=ClassFormat(num_labels=1))
        error = http.post("/score", json={**body, "instruction": "x"}).json()["error"]
        assert (error["param"], reason in error["message"]) == ("instruction", True)


def test_cohere_has_paths_among_those_of_kserve() -> None:
    client = TestClient(described_app(EchoService()))
    ranked = client.post("/v2/rerank", json={"query": "a", "documents": ["b"]})
    assert ranked.json()["results"][0]["index"] == 0
    assert client.post("/v2/embed", json={"texts": ["a"]}).json()["texts"] == ["a"]
    refused = client.get("/v2/embed")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert client.post("/v2/nothing", json={}).json() == {"error": "Not Found"}


def test_errors_of_admission(http, backend) -> None:
    backend.plant(RateLimitedError("slow down"))
    response = http.post("/rerank", json={"query": "a", "documents": ["b", "c"]})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert post(http, "/rerank", query="a", documents=["b", "c"])


def test_the_client_of_cohere(url, backend) -> None:
    if not (CLIENTS / "cohere").is_dir():
        pytest.skip("`make .venv/clients` installs the client of Cohere")
    run = subprocess.run(
        [sys.executable, str(PROGRAM), url],
        env={**os.environ, "PYTHONPATH": str(CLIENTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    reported = json.loads(run.stdout.splitlines()[-1])
    scores = [result["relevance_score"] for result in reported["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {result["index"] for result in reported["results"]} == {0, 1}
    assert [len(vector) for vector in reported["float"]] == [8, 8]
    assert [len(vector) for vector in reported["ubinary"]] == [1, 1]
    assert "embedding_types" in reported["error"]
    assert backend.requests[0].adapters, "model names an adapter"
