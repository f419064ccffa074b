import dataclasses
import json
import re
from pathlib import Path

import pytest

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import FIELDS
from loraplex.frontends.kserve.models.vllm import read_fields, vllm_sampling
from support.naming import naming, refused

OF_VLLM_0_3_0 = [
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logits_processors",
]


def sampling(**fields):
    made = vllm_sampling(read_fields(fields))
    made.validate()  # as admission does
    return made


def test_the_table_has_every_field_of_the_version_of_the_seeds():
    assert set(OF_VLLM_0_3_0) <= set(FIELDS)


def test_every_row_that_does_nothing_says_why():
    for field in FIELDS.values():
        assert bool(field.reason) is (field.support is not Support.WORKS), field.name
        assert (field.type is None) is (field.support is not Support.WORKS), field.name


def test_defaults_are_vllms():
    assert sampling() == SamplingParams(max_tokens=16, temperature=1.0, top_k=0, top_p=1.0)
    assert sampling(max_tokens=None, seed=None) == sampling()
    assert sampling(seed=-1).seed is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.1", 0.1),
        ("top_p", "0.95", 0.95),
        ("max_tokens", "100", 100),
        ("top_k", "-1", -1),
        ("seed", "7", 7),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("ignore_eos", 1, True),
        ("stop", "ab", ("ab",)),
        ("stop", ["a", "", "b"], ("a", "b")),
        ("stop", '["a"]', ('["a"]',)),
        ("stop_token_ids", "[1, 2]", (1, 2)),
        ("stop_token_ids", [3], (3,)),
        ("allowed_token_ids", ["4"], (4,)),
        ("logit_bias", {"9": 1, "4": -2.5}, ((4, -2.5), (9, 1.0))),
        ("logit_bias", '{"4": 1}', ((4, 1.0),)),
        ("skip_special_tokens", "no", False),
        ("bad_words", ["x"], ("x",)),
        ("min_p", "0.5", 0.5),
        ("max_tokens", 3.0, 3),
    ],
)
def test_a_text_is_read_as_its_fields_type(name, text, value):
    assert getattr(sampling(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("temperature", True, ("True",)),
        ("temperature", "warm", ("'warm'",)),
        ("max_tokens", 1.5, (1.5,)),
        ("max_tokens", "1.5", ("'1.5'",)),
        ("max_tokens", 10**400, None),
        ("temperature", 10**400, ()),
        ("ignore_eos", "perhaps", ("true or false", "'perhaps'")),
        ("ignore_eos", 2, ("true or false", 2)),
        ("stop", [1], ("[1]",)),
        ("stop_token_ids", "x" * 100, ("list",)),
        ("stop_token_ids", 5, ("list", 5)),
        ("logit_bias", "[]", ("JSON object",)),
        ("logit_bias", {"a": 1}, ("JSON object", "a")),
        ("logit_bias", "[" * 100_000, ("JSON object",)),
        ("lora_name", 5, (5,)),
    ],
)
def test_a_value_of_another_type_is_reported(name, value, named):
    with pytest.raises(InvalidParameterError) as caught:
        sampling(**{name: value})
    if named is not None:
        assert re.search(naming(name, *named), caught.value.message)
        assert len(caught.value.message) < 200


def test_unknown_and_unserved_fields():
    # vLLM's text.
    with pytest.raises(InvalidParameterError, match="Unexpected sampling parameter 'topp'; the"):
        read_fields({"topp": 1})
    with refused(UnsupportedFeatureError, "detokenize", param="detokenize"):
        read_fields({"detokenize": False})
    with refused(UnsupportedFeatureError, "truncate_prompt_tokens", param="truncate_prompt_tokens"):
        read_fields({"truncate_prompt_tokens": 1})
    nothing = {"detokenize": True, "logits_processors": [], "extra_args": None, "output_kind": 2}
    assert read_fields(nothing) == {}


def test_beam_search_of_old_versions():
    made = sampling(use_beam_search="true", best_of=4, n=2, length_penalty="0.5")
    assert (made.n, made.best_of) == (2, None)
    assert made.beam == BeamSearch(width=4, length_penalty=0.5)
    made = sampling(use_beam_search=True, n=3, early_stopping="never")
    assert made.beam == BeamSearch(width=3, early_stopping=EarlyStopping.NEVER)
    assert sampling(use_beam_search=True, early_stopping="True").beam == BeamSearch(
        width=1, early_stopping=EarlyStopping.AT_ONCE
    )
    assert sampling(best_of=3).best_of == 3


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_structured_outputs_are_an_object_or_its_text(name):
    grammar = Grammar(GrammarKind.REGEX, "a+")
    assert sampling(**{name: {"regex": "a+"}}).grammar == grammar
    assert sampling(**{name: json.dumps({"regex": "a+"})}).grammar == grammar
    with refused(
        InvalidParameterError,
        "structured_outputs",
        "json",
        "regex",
        "choice",
        param="structured_outputs",
    ):
        sampling(**{name: {"regex": "a+", "choice": ["a"]}})


def test_rows_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIELDS["n"].name = "m"


def test_the_documentation_names_every_parameter():
    text = (Path(__file__).parents[4] / "docs" / "options.md").read_text()
    section = text.split("## Models of the vLLM backend")[1]
    rows = {
        support: next(line for line in section.splitlines() if mark in line and line[0] == "|")
        for support, mark in (
            (Support.NO_EFFECT, "accepted without effect"),
            (Support.REFUSED, "| refused |"),
        )
    }
    for field in FIELDS.values():
        assert f"`{field.name}`" in rows.get(field.support, section), field.name
