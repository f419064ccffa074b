"""Requests that are refused before they reach an engine, and those that an engine receives."""

import math
import re

import msgspec
import pytest

from loraplex.core.adapter import AdapterUse
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.core.request import GenerateRequest, PromptTruncation, TruncationSide
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.admission import admit, check_request, cut_prompt
from loraplex.serving.backend import EncoderFormat, ModelCard
from support.naming import naming, refused

CARD = ModelCard(
    name="m",
    path="/m",
    created=0,
    max_model_len=10,
    vocab_size=100,
    eos_token_id=2,
    pad_token_id=0,
    dtype="float32",
    kv_dtype="float32",
)
WITH_ENCODER = msgspec.structs.replace(CARD, encoder=EncoderFormat(max_tokens=7, first_ids=(2,)))
PROMPT = (1, 2, 3)
NOW_NS = 5_000_000_000


def admitted(prompt=PROMPT, *, adapters=(), principal=LOCAL, card=CARD, request=None, **sampling):
    request = GenerateRequest(
        request_id=1,
        model=card.name,
        prompt=tuple(prompt),
        task=Generate(SamplingParams(**{"max_tokens": 4} | sampling)),
        **(request or {}),
    )
    check_request(request)
    return admit(
        request,
        prompt,
        model=card,
        eos_token_ids=(2, 3),
        adapters=tuple(adapters),
        principal=principal,
        now_ns=NOW_NS,
    )


def test_the_engine_receives_everything():
    request = admitted(
        adapters=[AdapterUse("d", 0.5)],
        principal=Principal("t"),
        request={"priority": -3, "timeout_seconds": 1.5},
        seed=7,
        temperature=0.5,
    )
    assert request.request_id == 1
    assert request.prompt_token_ids == PROMPT
    assert request.sampling == SamplingParams(max_tokens=4, seed=7, temperature=0.5)
    assert request.eos_token_ids == (2, 3)
    assert request.adapters == (AdapterUse("d", 0.5),)
    assert (request.tenant, request.priority) == ("t", -3)
    assert (request.arrival_ns, request.deadline_ns) == (NOW_NS, NOW_NS + 1_500_000_000)


@pytest.mark.parametrize("prompt", [(), []])
def test_an_empty_prompt(prompt):
    with refused(InvalidRequestError, "token", param="prompt"):
        admitted(prompt)


def test_a_prompt_leaves_space_for_one_token():
    assert admitted([1] * 9, max_tokens=1).sampling.max_tokens == 1
    for num_tokens in (10, 11):
        with pytest.raises(PromptTooLongError, match=naming(num_tokens, 9)) as e:
            admitted([1] * num_tokens, max_tokens=1)
        assert e.value.param == "prompt"


def test_max_tokens():
    assert admitted(max_tokens=None).sampling.max_tokens == 7
    assert admitted(max_tokens=7).sampling.max_tokens == 7
    with pytest.raises(
        PromptTooLongError,
        match=naming("max_tokens", 8, 7),
    ) as caught:
        admitted(max_tokens=8)
    assert caught.value.param == "max_tokens"


def test_max_tokens_may_be_cut_to_the_models_length():
    request = {"ends_at_max_len": True}
    assert admitted(max_tokens=8, request=request).sampling.max_tokens == 7
    assert admitted(max_tokens=6, request=request).sampling.max_tokens == 6
    with refused(PromptTooLongError, "min_tokens", 8, 10, "'m'", param="min_tokens"):
        admitted(max_tokens=9, min_tokens=8, request=request)


def test_min_tokens_must_fit():
    assert admitted(max_tokens=None, min_tokens=7).sampling.min_tokens == 7
    with refused(PromptTooLongError, "min_tokens", 8, 10, "'m'", param="min_tokens"):
        admitted(max_tokens=None, min_tokens=8)


@pytest.mark.parametrize("token_id", [-1, 100, 2**40])
def test_ids_outside_of_the_vocabulary(token_id):
    with pytest.raises(TokenOutOfVocabularyError, match=naming(token_id, "m", 0, 99)):
        admitted((1, token_id, 2))
    with refused(
        TokenOutOfVocabularyError, "stop_token_ids", token_id, "'m'", 99, param="stop_token_ids"
    ):
        admitted(stop_token_ids=(1, token_id))
    assert admitted((0, 99), stop_token_ids=(0, 99)).prompt_token_ids == (0, 99)


def test_sampling_is_checked():
    with refused(InvalidParameterError, "top_p", 2.0, param="top_p"):
        admitted(top_p=2.0)


def test_a_seed_is_always_set():
    seeds = {admitted().sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)]
)
def test_a_negative_seed_becomes_a_uint64(seed, expected):
    request = admitted(seed=seed)
    assert request.sampling.seed == expected
    assert msgspec.msgpack.encode(request)


@pytest.mark.parametrize(
    ("timeout", "deadline_ns"),
    [
        (None, None),
        (1e-9, NOW_NS + 1),
        (2, NOW_NS + 2_000_000_000),
        (1e8, NOW_NS + 10**17),
        (1e300, None),
        (math.inf, None),
    ],
)
def test_a_timeout_becomes_a_deadline(timeout, deadline_ns):
    request = admitted(request={"timeout_seconds": timeout})
    assert request.deadline_ns == deadline_ns
    assert msgspec.msgpack.encode(request)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, "5"])
def test_a_timeout_must_be_positive(timeout):
    with refused(InvalidParameterError, repr(timeout), param="timeout_seconds"):
        admitted(request={"timeout_seconds": timeout})


@pytest.mark.parametrize("priority", ["a", 1.5, True, None, 2**31, -(2**31)])
def test_a_priority_is_a_small_integer(priority):
    """Another would end the engine, which compares it with that of others."""
    with refused(InvalidParameterError, "priority", 2147483647, repr(priority), param="priority"):
        admitted(request={"priority": priority})


@pytest.mark.parametrize("end_id", ["a", 2.0])
def test_an_end_id_is_an_integer(end_id):
    with refused(InvalidParameterError, "end_id", repr(end_id), param="end_id"):
        admitted(request={"end_id": end_id})


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_must_be_finite(scale):
    with refused(InvalidParameterError, "scale", scale):
        admitted(adapters=[AdapterUse("d", scale)])


def test_the_salt_keeps_apart_what_must_not_share_kv():
    salts = [
        admitted(**fields).kv_salt
        for fields in (
            {},
            {"adapters": [AdapterUse("a")]},
            {"adapters": [AdapterUse("b")]},
            {"adapters": [AdapterUse("a", 0.5)]},
            {"adapters": [AdapterUse("a"), AdapterUse("b")]},
            {"adapters": [AdapterUse("b"), AdapterUse("a")]},
            {"principal": Principal("other")},
            {"card": msgspec.structs.replace(CARD, name="n")},
            {"card": msgspec.structs.replace(CARD, kv_dtype="int8")},
        )
    ]
    assert len(set(salts)) == len(salts)


def test_the_salt_is_the_same_for_all_else():
    salts = {
        admitted(prompt, adapters=[AdapterUse("a")], **fields).kv_salt
        for prompt, fields in (
            (PROMPT, {}),
            ((4, 5), {}),
            (PROMPT, {"temperature": 0.1, "seed": 3, "n": 2}),
            (PROMPT, {"request": {"priority": 1, "client_request_id": "x"}}),
            (PROMPT, {"principal": Principal(rights=Rights(manage=NONE))}),
        )
    }
    assert len(salts) == 1


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("allowed_token_ids", (1, 100)),
        ("stop_token_sequences", ((1, 2), (3, 100))),
        ("bad_token_ids", ((100,),)),
        ("logit_bias", ((5, 1.0), (100, 1.0))),
        ("top_p_reset_id", 100),
    ],
)
def test_every_token_id_must_be_in_the_vocabulary(param, value):
    with pytest.raises(TokenOutOfVocabularyError, match=naming(param, 100)) as caught:
        admitted(**{param: value})
    assert caught.value.param == param


def test_the_end_token_of_the_client():
    assert admitted(request={"end_id": 7}).eos_token_ids == (7,)
    assert not admitted(request={"end_id": 7}).sampling.ignore_eos
    none = admitted(request={"end_id": -1})
    assert (none.eos_token_ids, none.sampling.ignore_eos) == ((2, 3), True)
    with pytest.raises(TokenOutOfVocabularyError, match=naming("end_id", 100)):
        admitted(request={"end_id": 100})


def test_retention_is_checked_and_passed_on():
    retention = KVRetention((TokenRangeRetention(0, 2, 90),), decode_priority=10)
    assert admitted(request={"retention": retention}).retention == retention
    with pytest.raises(InvalidParameterError):
        admitted(request={"retention": KVRetention(decode_priority=101)})


def test_log_probabilities_that_the_choice_of_the_best_needs():
    assert admitted(best_of=3).sampling.logprobs == 0
    assert admitted(best_of=3, logprobs=2).sampling.logprobs == 2
    assert admitted(n=3, best_of=3).sampling.logprobs is None
    assert admitted(n=3).sampling.logprobs is None


def test_a_grammar_needs_a_token_to_end_with():
    request = GenerateRequest(
        request_id=1,
        model="m",
        prompt=PROMPT,
        task=Generate(SamplingParams(max_tokens=4, grammar=Grammar(GrammarKind.LLGUIDANCE, ""))),
    )

    def ends(end_id: int | None, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return admit(
            msgspec.structs.replace(request, end_id=end_id),
            PROMPT,
            model=CARD,
            eos_token_ids=eos_token_ids,
            adapters=(),
            principal=LOCAL,
            now_ns=NOW_NS,
        ).eos_token_ids

    assert ends(None, (2, 3)) == (2, 3)
    assert ends(7, ()) == (7,)
    assert ends(-1, (2,)) == (2,), "ignored, but a grammar ends with it"
    with refused(UnsupportedFeatureError, "'m'", "end_id", param="grammar"):
        ends(None, ())


def test_a_prompt_longer_than_its_own_limit():
    card = msgspec.structs.replace(CARD, max_input_len=5)
    assert admitted(range(3, 8), card=card)
    said = r"Prompt length \(6\) exceeds maximum input length \(5\)"
    with pytest.raises(PromptTooLongError, match=said):
        admitted(range(3, 9), card=card)


@pytest.mark.parametrize(
    ("truncation", "max_tokens", "card", "left"),
    [
        (PromptTruncation(3), 4, CARD, (6, 7, 8)),
        (PromptTruncation(3, TruncationSide.RIGHT), 4, CARD, (1, 2, 3)),
        (PromptTruncation(8), 4, CARD, (1, 2, 3, 4, 5, 6, 7, 8)),
        (PromptTruncation(99), 4, CARD, (1, 2, 3, 4, 5, 6, 7, 8)),
        (PromptTruncation(None), 4, CARD, (3, 4, 5, 6, 7, 8)),
        (PromptTruncation(None), None, CARD, (1, 2, 3, 4, 5, 6, 7, 8)),
        (PromptTruncation(None), 4, msgspec.structs.replace(CARD, max_input_len=2), (7, 8)),
        (PromptTruncation(None), 4, WITH_ENCODER, (2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_a_prompt_is_cut(truncation, max_tokens, card, left):
    request = GenerateRequest(
        request_id=1,
        model="m",
        prompt=tuple(range(1, 9)),
        truncation=truncation,
        task=Generate(SamplingParams(max_tokens=max_tokens)),
    )
    assert tuple(cut_prompt(request, request.truncation, request.prompt, card)) == left


@pytest.mark.parametrize(("most", "max_tokens"), [(0, 4), (-1, 4), (None, 10), (2.5, 4)])
def test_a_prompt_is_not_cut_to_nothing(most, max_tokens):
    request = GenerateRequest(
        request_id=1,
        model="m",
        prompt=(1, 2),
        truncation=PromptTruncation(most),
        task=Generate(SamplingParams(max_tokens=max_tokens)),
    )
    with pytest.raises(InvalidParameterError) as caught:
        cut_prompt(request, request.truncation, request.prompt, CARD)
    assert caught.value.param == "truncate_prompt_tokens"
    assert re.search(naming(1, "truncate_prompt_tokens"), caught.value.message)


@pytest.mark.parametrize(
    ("field", "value", "prompt", "error"),
    [
        ("decoder_prompt", (2, 100), (2, 100), TokenOutOfVocabularyError),
        ("forced_bos_token_id", 100, (2, 100), TokenOutOfVocabularyError),
        ("decoder_prompt", (2,) * 10, (2,) * 10, PromptTooLongError),
    ],
)
def test_what_a_decoder_begins_with_has_its_name_in_errors(field, value, prompt, error):
    request = GenerateRequest(request_id=1, model="m", prompt=(1,), **{field: value})
    with pytest.raises(error, match=field) as caught:
        admit(
            request,
            prompt,
            encoder_token_ids=(1,),
            model=WITH_ENCODER,
            eos_token_ids=(2,),
            adapters=(),
            principal=LOCAL,
            now_ns=NOW_NS,
        )
    assert caught.value.param == field


def test_a_cache_salt_is_part_of_the_salt():
    salts = {admitted(request={"cache_salt": salt}).kv_salt for salt in ("", "a", "b")}
    assert len(salts) == 3
