"""What a client may send of the sampler."""

import math

import msgspec
import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    RANGES,
    SamplingParams,
)
from support.naming import naming, refused

GOOD = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2**31 - 1},
    {"max_tokens": None, "min_tokens": 2**31 - 1},
    {"max_tokens": 5, "min_tokens": 5},
    {"n": 1},
    {"n": MAX_N},
    {"temperature": 0},
    {"temperature": 100},
    {"top_k": -1},
    {"top_k": 0},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"stop": ("x" * MAX_STOP_STRING_LENGTH,) * MAX_STOP_STRINGS},
    {"stop": ["a", "\N{GRINNING FACE}"], "stop_token_ids": [3, 4]},
]
BAD = [
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("max_tokens", 1.5),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("min_tokens", 17),  # more than max_tokens
    ("n", 0),
    ("n", MAX_N + 1),
    ("temperature", -0.01),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", None),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 0.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", False),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("stop", "END"),
    ("stop", ("",)),
    ("stop", ("x" * (MAX_STOP_STRING_LENGTH + 1),)),
    ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
    ("stop", (b"x",)),
    ("stop", ("\ud800",)),
    ("stop_token_ids", 3),
    ("stop_token_ids", ("3",)),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 1),
    ("include_stop_in_output", None),
    ("grammar", "a+"),
    ("grammar", Grammar("regex", "a+")),
    ("grammar", Grammar(GrammarKind.REGEX, 5)),
    ("logit_bias", {5: 1.0}),
    ("logit_bias", ((5,),)),
    ("logit_bias", ((True, 1.0),)),
    ("logit_bias", (("5", 1.0),)),
    ("bad_token_ids", ([5],)),
    ("bad_words", ("a" * 4096,) * 17),
    ("stop_token_sequences", ((5, "6"),)),
]


def test_every_default_is_in_its_range():
    """`validate` looks at other values only."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    for name in RANGES.keys() & defaults.keys():
        low, high, _, is_above_low, _ = RANGES[name]
        default = defaults[name]
        assert default is None or (low < default if is_above_low else low <= default), name
        assert default is None or default <= high, name


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_values_pass(fields):
    SamplingParams(**fields).validate()


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_a_bad_value_is_named(field, value):
    with pytest.raises(InvalidParameterError, match=field.split("_")[0]) as caught:
        SamplingParams(**{field: value}).validate()
    assert caught.value.param == field
    assert "\n" not in caught.value.message


def test_the_limits_are_reported():
    with pytest.raises(InvalidParameterError, match=naming("top_p", "(0, 1]", 2)):
        SamplingParams(top_p=2).validate()
    with pytest.raises(InvalidParameterError, match=naming("n", "[1, 128]", 0)):
        SamplingParams(n=0).validate()


def test_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1, top_k=1).is_greedy
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}],
)
def test_penalties(fields):
    assert SamplingParams(**fields).has_penalties
    assert not SamplingParams().has_penalties


def test_only_what_changes_is_checked():
    """max_tokens 0 stands there, but is not what is changed."""
    odd = SamplingParams(max_tokens=0)
    assert odd.changed({"top_k": 3, "seed": None}) == SamplingParams(max_tokens=0, top_k=3)
    with refused(InvalidParameterError, "top_k", -2, param="top_k"):
        odd.changed({"top_k": -2})
    with refused(InvalidParameterError, "max_tokens", -1, param="max_tokens"):
        odd.changed({"max_tokens": -1})


def test_what_changes_is_checked_with_the_rest():
    with refused(InvalidParameterError, "min_tokens", 8, "max_tokens", 5, param="min_tokens"):
        SamplingParams(min_tokens=8).changed({"max_tokens": 5})
