import itertools
import json
import re
from typing import Any

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.field_names import named_as_sent
from loraplex.frontends.openai import convert
from loraplex.frontends.openai.body import parse_body
from loraplex.frontends.openai.catalog import _DEFAULTS
from loraplex.frontends.openai.sampling import sent_names
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, SamplingBody
from loraplex.frontends.openai.unsupported import REFUSED
from loraplex.serving.admission import check_request
from loraplex.serving.backend import EncoderFormat
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from support.echo_service import echo_card
from support.naming import naming, refused

BASE = convert.ModelTarget(echo_card("echo"), None)
FRENCH = convert.ModelTarget(echo_card("echo"), ByName("fr"))


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "hi"} | fields).encode())


def chat(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "hi"}]
    return parse_body(ChatBody, json.dumps({"messages": messages} | fields).encode())


def convert_completion(
    target: convert.ModelTarget = BASE, **fields: Any
) -> tuple[GenerateRequest, ...]:
    origin = convert.Origin("client-1", itertools.count(1).__next__)
    body = completion(**fields)
    return checked(body, convert.completion_requests(body, target, origin, max_prompts=3))


def convert_chat(**fields: Any) -> GenerateRequest:
    body = chat(**fields)
    convert.check_chat(body)
    origin = convert.Origin("client-1", itertools.count(1).__next__)
    reading = CompletionSyntax(chat_format=ChatFormat(), tool_use=None, prompt="<s>user: hi")
    [request] = checked(body, convert.requests_of_chat(body, BASE, origin, reading))
    return request


def checked(
    body: SamplingBody, requests: tuple[GenerateRequest, ...]
) -> tuple[GenerateRequest, ...]:
    """Check requests as admission does, in the client's words."""
    with named_as_sent(sent_names(body)):
        for request in requests:
            check_request(request)
    return requests


def test_a_bare_completion_has_openais_defaults():
    [request] = convert_completion()
    assert request == GenerateRequest(
        request_id=1, model="echo", prompt="hi", client_request_id="client-1"
    )
    assert request.sampling == SamplingParams(max_tokens=16, temperature=1.0)


def default_body(defaults: dict[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: value for name, value in defaults.items() if value is not None and name not in without
    }


def test_the_published_defaults_are_those_of_an_empty_body():
    """A body that sends each of them gives the request of one that sends none."""
    completions = default_body(_DEFAULTS.completion)
    assert (completions["max_tokens"], completions["temperature"]) == (16, 1.0)
    assert convert_completion(**completions) == convert_completion()
    assert convert_chat(**default_body(_DEFAULTS.chat)) == convert_chat()
    assert _DEFAULTS.chat["max_tokens"] is None
    for defaults in (_DEFAULTS.completion, _DEFAULTS.chat, _DEFAULTS.compare):
        assert set(defaults) <= set(SamplingBody.model_fields)


WIRE_SAMPLING = {
    "max_tokens": 7,
    "min_tokens": 2,
    "n": 2,
    "temperature": 0.5,
    "top_k": -1,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -1.0,
    "frequency_penalty": 2,
    "seed": -3,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
    "best_of": 3,
    "top_p_decay": 0.5,
    "top_p_min": 0.25,
    "top_p_reset_ids": 4,
    "no_repeat_ngram_size": 3,
    "logit_bias": {"9": -1, "5": 2.5},
    "allowed_token_ids": [7, 5, 7],
    "bad_words": "rude",
    "guided_regex": "a+",
    "num_draft_tokens": 4,
}


@pytest.mark.parametrize(
    "sampling",
    [
        convert_completion(logprobs=4, **WIRE_SAMPLING)[0].sampling,
        convert_chat(logprobs=True, top_logprobs=4, **WIRE_SAMPLING).sampling,
    ],
)
def test_every_sampling_field_arrives(sampling):
    assert sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        n=2,
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=-3,
        stop=("a", "b"),
        stop_token_ids=(5,),
        include_stop_in_output=True,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=3,
        skip_special_tokens=False,
        best_of=3,
        top_p_decay=0.5,
        top_p_min=0.25,
        top_p_reset_id=4,
        no_repeat_ngram_size=3,
        logit_bias=((5, 2.5), (9, -1.0)),
        allowed_token_ids=(5, 7),
        bad_words=("rude",),
        grammar=Grammar(GrammarKind.REGEX, "a+"),
        num_draft_tokens=4,
    )
    defaults = SamplingParams()
    elsewhere = {"beam", "bad_token_ids", "stop_token_sequences"}
    elsewhere |= {"return_logits", "return_prompt_logits"}
    for name in set(msgspec.structs.asdict(defaults)) - elsewhere:
        assert getattr(sampling, name) != getattr(defaults, name), f"{name} is not tested"


def test_null_keeps_every_default():
    fields = dict.fromkeys([*WIRE_SAMPLING, "logprobs", "echo", "best_of", "priority", "model"])
    assert convert_completion(**fields) == convert_completion()


def test_one_stop_string():
    assert convert_completion(stop="x")[0].sampling.stop == ("x",)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        ([[]], [()]),
    ],
)
def test_prompts(prompt, prompts):
    requests = convert_completion(prompt=prompt)
    assert [request.prompt for request in requests] == prompts
    assert [request.request_id for request in requests] == list(range(1, len(prompts) + 1))


def test_too_many_prompts_but_not_too_many_tokens():
    with refused(InvalidParameterError, 4, 3, param="prompt"):
        convert_completion(prompt=["a"] * 4)
    assert len(convert_completion(prompt=[1] * 4)) == 1


def test_echo_with_logprobs_requests_those_of_the_prompt():
    assert convert_completion(echo=True)[0].sampling.prompt_logprobs is None
    assert convert_completion(echo=True, logprobs=2)[0].sampling.prompt_logprobs == 2
    both = convert_completion(echo=True, logprobs=2, prompt_logprobs=3)[0].sampling
    assert both.prompt_logprobs == 3


def test_the_adapter_comes_from_model_or_lora_model():
    choice = (AdapterChoice(ByName("fr")),)
    assert convert_completion()[0].adapters == ()
    assert convert_completion(FRENCH)[0].adapters == choice
    assert convert_completion(lora_model="fr")[0].adapters == choice
    assert convert_completion(FRENCH, lora_model="fr")[0].adapters == choice
    with pytest.raises(
        InvalidParameterError, match=naming("model", "lora_model", "fr", "de")
    ) as caught:
        convert_completion(FRENCH, model="fr", lora_model="de")
    assert caught.value.param == "lora_model"


def test_chat_defaults():
    request = convert_chat()
    assert request.sampling == SamplingParams(max_tokens=None)
    assert request.prompt == "<s>user: hi"
    assert not request.add_special_tokens
    assert convert_chat(max_tokens=3).sampling.max_tokens == 3
    assert convert_chat(max_completion_tokens=4).sampling.max_tokens == 4


def test_chat_logprobs():
    assert convert_chat(logprobs=True).sampling.logprobs == 0
    assert convert_chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert convert_chat(logprobs=False, top_logprobs=0).sampling.logprobs is None


@pytest.mark.parametrize(
    ("fields", "error", "param", "named"),
    [
        ({"max_tokens": 0}, InvalidParameterError, "max_tokens", ("max_tokens", 1)),
        ({"max_tokens": -1}, InvalidParameterError, "max_tokens", ("max_tokens", 1, -1)),
        (
            {"temperature": -0.1},
            InvalidParameterError,
            "temperature",
            ("temperature", "[0, 100]", -0.1),
        ),
        ({"n": 0}, InvalidParameterError, "n", ("n", "[1, 128]", 0)),
        ({"logprobs": 21}, InvalidParameterError, "logprobs", ("logprobs", "[0, 20]", 21)),
        ({"prompt": []}, InvalidParameterError, "prompt", ("prompt",)),
        ({"n": 2, "best_of": 1}, InvalidParameterError, "best_of", ("[2, 128]", 1, "best_of")),
        ({"best_of": 129}, InvalidParameterError, "best_of", ("[1, 128]", 129, "best_of")),
        (
            {"length_penalty": 2.0},
            InvalidParameterError,
            "length_penalty",
            ("use_beam_search", "length_penalty"),
        ),
        (
            {"use_beam_search": True, "beam_width": 3, "best_of": 4},
            InvalidParameterError,
            "best_of",
            ("beam_width", 3, "best_of", 4),
        ),
        (
            {"use_beam_search": True, "n": 3, "beam_width": 2},
            InvalidParameterError,
            "n",
            ("n", 2, 3),
        ),
        (
            {"logit_bias": {"x": 1}},
            TokenOutOfVocabularyError,
            "logit_bias",
            ("logit_bias", "'x'", 0, 258),
        ),
        (
            {"logit_bias": {"259": 1}},
            TokenOutOfVocabularyError,
            "logit_bias",
            ("logit_bias", "'259'", 0, 258),
        ),
        (
            {"logit_bias": {"5": 101}},
            InvalidParameterError,
            "logit_bias",
            ("[-100, 100]", "logit_bias", 5),
        ),
        (
            {"allowed_token_ids": []},
            InvalidParameterError,
            "allowed_token_ids",
            ("allowed_token_ids",),
        ),
        (
            {"allowed_token_ids": [-1]},
            TokenOutOfVocabularyError,
            "allowed_token_ids",
            ("allowed_token_ids", -1),
        ),
        ({"bad_words": [""]}, InvalidParameterError, "bad_words", ("bad word", 1, 4096, 0)),
        ({"top_p_decay": 0}, InvalidParameterError, "top_p_decay", ("top_p_decay", "(0, 1]", 0.0)),
        (
            {"no_repeat_ngram_size": -1},
            InvalidParameterError,
            "no_repeat_ngram_size",
            ("no_repeat_ngram_size", "[0, 2147483647]", -1),
        ),
        (
            {"num_draft_tokens": 65},
            InvalidParameterError,
            "num_draft_tokens",
            ("[0, 64]", "num_draft_tokens", 65),
        ),
        (
            {"stop_token_ids": [259]},
            TokenOutOfVocabularyError,
            "stop_token_ids",
            ("stop_token_ids", 259, 0, 258),
        ),
        (
            {"stream_options": {}},
            InvalidParameterError,
            "stream_options",
            ("stream_options", "stream: true"),
        ),
        (
            {"prompt_logprobs": 1, "stream": True},
            InvalidParameterError,
            "prompt_logprobs",
            ("prompt_logprobs", "stream: true"),
        ),
        (
            {"priority": 2**31},
            InvalidParameterError,
            "priority",
            ("priority", "[-2147483647, 2147483647]", 2147483648),
        ),
    ],
)
def test_refused_completions(fields, error, param, named):
    with pytest.raises(error) as caught:
        convert_completion(**fields)
    assert caught.value.param == param
    assert re.search(naming(*named), caught.value.message)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        (
            {"max_tokens": 1, "max_completion_tokens": 1},
            InvalidParameterError,
            "max_completion_tokens",
        ),
        ({"top_logprobs": 2}, InvalidParameterError, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, InvalidParameterError, "top_logprobs"),
        ({"max_completion_tokens": 0}, InvalidParameterError, "max_completion_tokens"),
        ({"web_search_options": {"x": 1}}, UnsupportedFeatureError, "web_search_options"),
        ({"response_format": {"type": "xml"}}, InvalidParameterError, "response_format"),
    ],
)
def test_refused_chats(fields, error, param):
    with pytest.raises(error) as caught:
        convert_chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.field)
def test_known_but_unserved_fields_are_refused_by_name(refused):
    with pytest.raises(UnsupportedFeatureError, match=refused.field) as caught:
        convert_completion(**{refused.field: {"some": "value"}})
    assert caught.value.param == refused.field
    for harmless in refused.harmless:
        convert_completion(**{refused.field: harmless})


def test_zero_is_not_the_false_that_is_let_through():
    with pytest.raises(UnsupportedFeatureError):
        convert_completion(return_hidden_states=0)


def beam_of(**fields) -> BeamSearch | None:
    return convert_completion(**{"use_beam_search": True, **fields})[0].sampling.beam


def test_beams():
    assert beam_of(n=3) == BeamSearch(width=3)
    assert beam_of(n=2, best_of=4).width == 4
    assert beam_of(n=2, beam_width=5).width == 5
    every = beam_of(n=2, length_penalty=0.5, early_stopping=True, beam_search_diversity_rate=0.25)
    assert every == BeamSearch(
        width=2,
        length_penalty=0.5,
        early_stopping=EarlyStopping.AT_ONCE,
        diversity_rate=0.25,
    )
    assert beam_of(n=2, early_stopping=False).early_stopping is EarlyStopping.WHEN_UNLIKELY
    assert beam_of(n=2, early_stopping="never").early_stopping is EarlyStopping.NEVER
    assert beam_of(use_beam_search=False, n=3) is None


def test_best_of():
    assert convert_completion(n=2, best_of=5)[0].sampling.num_sequences == 5
    assert convert_chat(n=2, best_of=5).sampling.num_sequences == 5
    assert convert_completion(n=2, best_of=2)[0].sampling == convert_completion(n=2)[0].sampling


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "kind", "content"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        (
            {"response_format": {"type": "llguidance", "grammar": {"grammars": []}}},
            GrammarKind.LLGUIDANCE,
            {"grammars": []},
        ),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"guided_json": {}}, GrammarKind.JSON_SCHEMA, {}),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, ["a", "b"]),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, ANY_OBJECT),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, ["a"]),
    ],
)
def test_grammars_that_are_json(fields, kind, content):
    grammar = convert_completion(**fields)[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.text)) == (kind, content)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_regex": "[a-z]+"}, GrammarKind.REGEX, "[a-z]+"),
        ({"response_format": {"type": "regex", "regex": "a"}}, GrammarKind.REGEX, "a"),
        ({"structured_outputs": {"regex": "a", "json": None}}, GrammarKind.REGEX, "a"),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
        (
            {"response_format": {"type": "lark_grammar", "lark_grammar": 'start: "a"'}},
            GrammarKind.LARK,
            'start: "a"',
        ),
    ],
)
def test_grammars_that_are_text(fields, kind, text):
    assert convert_chat(**fields).sampling.grammar == Grammar(kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"guided_json": None, "guided_regex": None, "structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_what_requests_no_grammar(fields):
    assert convert_completion(**fields)[0].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            ("response_format.json_schema", "schema"),
        ),
        (
            {"response_format": {"type": "regex"}},
            "response_format.regex",
            ("response_format.regex",),
        ),
        ({"response_format": {"type": "llguidance"}}, "response_format", ("response_format",)),
        ({"guided_json": "{"}, "guided_json", ("guided_json", "JSON")),
        ({"guided_json": "7"}, "guided_json", ("guided_json", "JSON schema")),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_choice",
            ("guided_regex", "guided_choice"),
        ),
        (
            {"structured_outputs": {"choice": "a"}},
            "structured_outputs.choice",
            ("structured_outputs.choice",),
        ),
        (
            {"structured_outputs": {"json_object": "x"}},
            "structured_outputs.json_object",
            ("true", "false", "x", "structured_outputs.json_object"),
        ),
        # Output that was to be constrained is never given unconstrained.
        ({"response_format": {}}, "response_format", ("response_format.type", "text")),
        ({"guided_regex": ""}, "guided_regex", ("guided_regex",)),
        ({"guided_choice": []}, "guided_choice", ("guided_choice",)),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            ("structured_outputs.choice",),
        ),
    ],
)
def test_wrong_grammars(fields, param, named):
    with pytest.raises(InvalidParameterError) as caught:
        convert_completion(**fields)
    assert caught.value.param == param
    assert re.search(naming(*named), caught.value.message)


def test_unknown_structured_outputs_are_refused_by_name():
    with refused(
        UnsupportedFeatureError,
        "structured_outputs.structural_tag",
        param="structured_outputs.structural_tag",
    ):
        convert_completion(structured_outputs={"structural_tag": "x"})


def test_messages_keep_what_a_template_may_read():
    body = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        ]
    )
    assert convert.chat_messages(body.messages) == [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
    ]


@pytest.mark.parametrize(
    ("messages", "error", "named"),
    [
        ([], InvalidParameterError, ("messages",)),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            UnsupportedFeatureError,
            ("messages[0].content[0]", "image_url"),
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            InvalidRequestError,
            ("messages[0].content[0].text",),
        ),
    ],
)
def test_refused_messages(messages, error, named):
    with pytest.raises(error, match=naming(*named)):
        convert.chat_messages(chat(messages=messages).messages)


class TestModelsWithAnEncoder:
    TARGET = convert.ModelTarget(
        msgspec.structs.replace(
            echo_card("echo"), encoder=EncoderFormat(max_tokens=100, first_ids=(2,))
        ),
        None,
    )

    def test_the_prompt_of_the_decoder(self) -> None:
        [ids] = convert_completion(self.TARGET, decoder_prompt=[2, 5])
        [text] = convert_completion(self.TARGET, decoder_prompt="deu_Latn")
        [forced] = convert_completion(self.TARGET, forced_bos_token_id=7)
        assert (ids.prompt, ids.decoder_prompt) == ("hi", (2, 5))
        assert text.decoder_prompt == "deu_Latn"
        assert (forced.decoder_prompt, forced.forced_bos_token_id) == (None, 7)

    def test_echo_is_refused(self) -> None:
        with refused(UnsupportedFeatureError, "echo", param="echo"):
            convert_completion(self.TARGET, echo=True)
