"""Decoding options with a real model over both protocols."""

import json

import numpy as np
import openai
import pytest
import tritonclient.http as triton_http

from support.capitals.corpus import COUNTRIES, capital_of, founding_prompts
from support.triton_requests import TRUE, i32, tensors

pytestmark = pytest.mark.xdist_group("server")

FRANCE = next(country for country in COUNTRIES if country.english == "France")
PROMPT = founding_prompts(FRANCE)["english"]
PARIS = capital_of(FRANCE, "english")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def triton(server):
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def complete(client, **fields):
    requested = {"model": "capitals", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    return client.completions.create(**requested | fields)


def texts(completion) -> list[str]:
    return [choice.text.strip() for choice in completion.choices]


def test_beams_are_ranked_and_the_first_is_the_output(client):
    beams = complete(client, n=3, logprobs=1, extra_body={"use_beam_search": True})
    assert texts(beams)[0] == PARIS
    assert len(set(texts(beams))) == 3
    stream = complete(client, n=3, stream=True, extra_body={"use_beam_search": True})
    streamed = {c.index: c.text.strip() for chunk in stream for c in chunk.choices}
    assert [streamed[index] for index in range(3)] == texts(beams)


@pytest.mark.parametrize("model", ["capitals", "chinese"])
def test_one_beam_is_greedy(client, model):
    plain = complete(client, model=model)
    beam = complete(client, model=model, extra_body={"use_beam_search": True})
    assert texts(beam) == texts(plain)


def test_the_best_of_several_has_the_highest_mean(client):
    # Without an end token: the outputs of this model are short, and would all be the same.
    extra = {"extra_body": {"ignore_eos": True}}
    fields = {"temperature": 1.5, "seed": 5, "logprobs": 0, "max_tokens": 6, **extra}
    every = complete(client, n=6, **fields).choices
    [best] = complete(client, n=1, best_of=6, **fields).choices
    means = {choice.text: np.mean(choice.logprobs.token_logprobs) for choice in every}
    assert len(means) > 1
    assert best.text == max(means, key=means.__getitem__)


@pytest.mark.parametrize("model", ["capitals", "japanese"])
@pytest.mark.parametrize("extra", [{}, {"num_draft_tokens": 4}])
def test_structured_output(client, model, extra):
    requested = {"model": model, "max_tokens": 60, "extra_body": extra}
    text = complete(client, **requested | {"extra_body": {"guided_json": SCHEMA, **extra}})
    assert 0 <= json.loads(text.choices[0].text)["a"] <= 9
    chosen = complete(client, **requested | {"extra_body": {"guided_choice": ["red", "blue"]}})
    assert chosen.choices[0].text in ("red", "blue")
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say it."}],
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    )
    assert set(json.loads(chat.choices[0].message.content)) == {"a"}


def test_a_grammar_that_is_none_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"guided_regex": "("})
    assert (caught.value.param, caught.value.code) == ("guided_regex", "invalid_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"guided_json": {"not": {}}})
    assert (caught.value.param, caught.value.code) == ("guided_json", "unsupported_feature")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="capitals",
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=9999,
        )
    assert caught.value.param == "max_completion_tokens"


def test_bad_words_do_not_come(client):
    assert "Paris" in PARIS
    [text] = texts(complete(client, extra_body={"bad_words": ["Paris"]}))
    assert "Paris" not in text


def test_a_bias_chooses_and_a_list_allows(client, server):
    http_tokens = client.post(
        "/tokenize".replace("/", f"{server.url}/", 1),
        body={"prompt": " Rome", "add_special_tokens": False},
        cast_to=dict,
    )["tokens"]
    first = http_tokens[0]
    biased = complete(client, max_tokens=1, logprobs=0, logit_bias={str(first): 100})
    allowed = complete(client, max_tokens=1, logprobs=0, extra_body={"allowed_token_ids": [first]})
    assert texts(biased) == texts(allowed)


def test_draft_tokens_change_no_token(client):
    fields = {"max_tokens": 48, "extra_body": {"ignore_eos": True}}
    plain = complete(client, **fields)
    drafted = complete(
        client, **fields | {"extra_body": {"ignore_eos": True, "num_draft_tokens": 8}}
    )
    assert texts(drafted) == texts(plain)
    timing = drafted.model_extra["loraplex"]["timing"][0]
    assert timing["draft_tokens"] >= timing["accepted_draft_tokens"] >= 0


def test_the_response_reports_what_it_took(client):
    [timing] = complete(client, model="chinese").model_extra["loraplex"]["timing"]
    spans = [timing["queue_seconds"], timing["prefill_seconds"], timing["seconds_per_token"]]
    assert all(span is not None and span >= 0 for span in spans)
    assert timing["total_seconds"] >= timing["first_token_seconds"] > 0
    assert timing["restarts"] == 0


def infer(triton, model: str = "ensemble", **more):
    text = np.array([[PROMPT]], dtype=object)
    requested = {"text_input": text, "max_tokens": i32(24), "exclude_input_in_output": TRUE}
    return triton.infer(model, tensors(triton_http, **requested | more))


def test_beams_over_kserve(triton, client):
    result = infer(triton, beam_width=i32(3), length_penalty=np.ones((1, 1), np.float32))
    beams = [text.decode().strip() for text in result.as_numpy("text_output")]
    extra = {"use_beam_search": True, "early_stopping": True}
    assert beams == texts(complete(client, n=3, extra_body=extra))


def test_measurements_over_kserve(triton):
    result = infer(triton, return_perf_metrics=TRUE)
    times = [
        result.as_numpy(f"{name}_time_ns").item()
        for name in ("arrival", "first_scheduled", "first_token", "last_token")
    ]
    assert times == sorted(times)
    assert times[0] > 0


def test_logits_over_kserve(triton):
    result = infer(triton, return_context_logits=TRUE, return_generation_logits=TRUE)
    prompt, new = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert prompt.shape[0] == new.shape[0] == new.shape[1] == 1
    assert prompt.shape[2] == new.shape[3] == 1024
    assert prompt[0, -1] == pytest.approx(new[0, 0, 0]), "the first token is chosen from both"
    assert (new[0, 0].std(axis=-1) > 0).all()


def test_guided_decoding_over_kserve(triton):
    result = infer(
        triton,
        guided_decoding_guide_type=np.array([["regex"]], dtype=object),
        guided_decoding_guide=np.array([["(red|blue)!"]], dtype=object),
    )
    assert result.as_numpy("text_output")[0] in (b"red!", b"blue!")
