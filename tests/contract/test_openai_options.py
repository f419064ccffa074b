"""Decoding options through the openai package, and the response fields that report them."""

import re
from collections.abc import Iterator

import openai
import pytest
from starlette.applications import Starlette

from loraplex.core.beam_search import BeamSearch
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served

HELLO = [{"role": "user", "content": "hello"}]
BEAMS = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}


@pytest.fixture(scope="module")
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr")
    backend.num_cached_tokens = 2
    return backend


@pytest.fixture(scope="module")
def client(backend) -> Iterator[openai.OpenAI]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with (
        served(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def complete(client, **fields):
    return client.completions.create(**{"model": "echo", "prompt": "hi", "max_tokens": 50} | fields)


def texts(chunks) -> dict[int, list[str]]:
    """The pieces of text that each choice came in."""
    pieces: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            pieces.setdefault(choice.index, []).append(choice.text)
    return pieces


def test_beams_come_whole_also_in_a_stream(client, backend):
    completion = complete(client, n=2, extra_body=BEAMS)
    assert [choice.text for choice in completion.choices] == ["echo: hi", "echo: hi #1"]
    beam = backend.requests[-1].sampling.beam
    assert (beam.width, beam.length_penalty, beam.early_stopping) == (2, 0.5, "at_once")
    chunks = list(complete(client, n=2, stream=True, extra_body=BEAMS))
    assert texts(chunks) == {0: ["echo: hi"], 1: ["echo: hi #1"]}


def test_a_stream_of_the_best_comes_at_its_end(client, backend):
    chunks = list(complete(client, n=1, best_of=3, stream=True))
    assert texts(chunks) == {0: ["echo: hi #1"]}, "its tokens are the likeliest on average"
    assert backend.requests[-1].sampling.best_of == 3
    many = list(complete(client, n=1, stream=True))
    assert len(texts(many)[0]) > 1, "what is made comes as it is made"


def test_beams_of_a_chat(client, backend):
    chat = client.chat.completions.create(
        model="echo", messages=HELLO, n=2, extra_body={"use_beam_search": True, "beam_width": 3}
    )
    assert len(chat.choices) == 2
    assert backend.requests[-1].sampling.beam == BeamSearch(width=3)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
                }
            },
            GrammarKind.JSON_SCHEMA,
        ),
        ({"extra_body": {"guided_choice": ["a", "b"]}}, GrammarKind.CHOICE),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, GrammarKind.REGEX),
    ],
)
def test_structured_output(client, backend, fields, kind):
    client.chat.completions.create(model="echo", messages=HELLO, **fields)
    grammar = backend.requests[-1].sampling.grammar
    assert isinstance(grammar, Grammar)
    assert grammar.kind is kind


def test_what_steers_the_choice_of_tokens(client, backend):
    complete(
        client,
        logit_bias={"65": -100},
        extra_body={
            "bad_words": ["rude"],
            "allowed_token_ids": [65, 66],
            "no_repeat_ngram_size": 2,
            "top_p_decay": 0.5,
            "num_draft_tokens": 3,
            "timeout_seconds": 1.5,
            "priority": -1,
        },
    )
    request = backend.requests[-1]
    sampling = request.sampling
    assert sampling.logit_bias == ((65, -100.0),)
    assert sampling.bad_words == ("rude",)
    assert sampling.allowed_token_ids == (65, 66)
    assert (sampling.no_repeat_ngram_size, sampling.top_p_decay) == (2, 0.5)
    assert sampling.num_draft_tokens == 3
    assert (request.timeout_seconds, request.priority) == (1.5, -1)


def test_the_response_reports_its_times_and_adapters(client, backend):
    completion = complete(client, model="fr", prompt=["a", "b"])
    details = completion.model_extra["loraplex"]
    [adapter] = details["adapters"]
    assert (adapter["name"], adapter["scale"]) == ("fr", 1.0)
    assert len(adapter["digest"]) == 64
    assert [timing["cached_tokens"] for timing in details["timing"]] == [2, 2], "one per prompt"
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("include_usage", [True, False])
def test_so_does_the_usage_chunk_of_a_stream(client, include_usage):
    chunks = list(
        client.chat.completions.create(
            model="fr",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": include_usage},
        )
    )
    reported = [
        chunk.model_extra["loraplex"] for chunk in chunks if "loraplex" in chunk.model_extra
    ]
    assert len(reported) == include_usage
    assert all(details["adapters"][0]["name"] == "fr" for details in reported)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"best_of": 1, "n": 2}, "best_of", ("best_of", "[2, 128]", 1)),
        ({"logit_bias": {"a": 1}}, "logit_bias", ("logit_bias", "a")),
        ({"extra_body": {"bad_words": 5}}, "bad_words", ("bad_words", 5)),
        ({"extra_body": {"guided_json": "{"}}, "guided_json", ("guided_json", "JSON")),
        (
            {"extra_body": {"early_stopping": "soon"}},
            "early_stopping",
            ("true", "false", "never", "early_stopping", "soon"),
        ),
        ({"extra_body": {"beam_width": 2}}, "beam_width", ("use_beam_search", "beam_width")),
        (
            {"extra_body": {"response_format": {"type": "xml"}}},
            "response_format",
            ("response_format.type", "text", "json_object", "json_schema", "xml"),
        ),
    ],
)
def test_a_wrong_value_is_reported_with_its_name(client, fields, param, named):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    assert caught.value.param == param
    assert re.search(naming(*named), caught.value.message)
