import numpy as np
import pytest

from loraplex.core.adapter import AdapterChoice, ByTaskId
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidTensorError,
    TokenOutOfVocabularyError,
)
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.frontends.kserve.models.convert import RequestHead, convert, split_words
from loraplex.frontends.kserve.models.inputs import read_inputs
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import ModelOptions, ModelTexts, TritonModel
from loraplex.frontends.kserve.tensors import DATATYPES, Tensor, from_values
from support.echo_service import EchoService, echo_card
from support.naming import naming, refused

EOS = 257


def tensors(kind, values):
    made = []
    for name, value in values.items():
        row = kind.inputs_by_name[name]
        flat = value if isinstance(value, list) else [value]
        shape = [1, len(flat)] if row.dims in ((1,), (-1,)) else [1, 2, len(flat) // 2]
        made.append(from_values(name, row.datatype, shape, flat))
    return made


def converted(kind, values, options=ModelOptions(), **sent):  # noqa: B008 - it is frozen
    return of_tensors(kind, tensors(kind, values), options, **sent)


def of_tensors(kind, given, options=ModelOptions(), **sent):  # noqa: B008 - it is frozen
    model = TritonModel(
        name=kind.name,
        kind=kind,
        base_model="echo",
        max_batch_size=1,
        options=options,
        card=echo_card("echo"),
        texts=ModelTexts(EchoService(), "echo"),
    )
    inputs = read_inputs(kind, kind.name, given, max_batch_size=1)[0]
    return convert(inputs, model, RequestHead(request_id=7, model="echo", **sent), {})


def text(**values):
    return converted(ENSEMBLE, {"text_input": "hi", "max_tokens": 5, **values})


def tokens(**values):
    core = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 5}
    return converted(TENSORRT_LLM, {**core, **values})


def test_defaults_of_the_runtime():
    """Greedy, seed 0, no end token first; text ends at the model's end, token ids do not."""
    sampling = text().request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (5, 1, 1)
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 1.0)
    assert (sampling.seed, sampling.logprobs, sampling.stop) == (0, None, ())
    assert not sampling.ignore_eos
    assert not sampling.include_stop_in_output
    assert tokens().request.sampling.ignore_eos
    assert tokens().end_token_ids == frozenset()
    assert text().end_token_ids == {EOS}


def test_every_value_arrives():
    values = {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 3,
        "seed": 2**64 - 1,
    }
    got = text(**values, top_k=9, top_p=0.75, num_return_sequences=2).request.sampling
    assert (got.top_k, got.top_p, got.n) == (9, 0.75, 2)
    assert {name: getattr(got, name) for name in values} == values
    got = tokens(**values, runtime_top_k=9, runtime_top_p=0.75).request.sampling
    assert (got.top_k, got.top_p) == (9, 0.75)
    assert {name: getattr(got, name) for name in values} == values


def test_older_names():
    got = text(min_length=2, random_seed=9).request.sampling
    assert (got.min_tokens, got.seed) == (2, 9)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 0.5, (0, 0.5)),
        (0, 0.0, (1, 1.0)),
        (0, -1.0, (1, 1.0)),
        (5, 0.0, (5, 1.0)),
        (5, 0.5, (5, 0.5)),
    ],
)
def test_top_k_and_top_p(top_k, top_p, expected):
    """0 and 0 is greedy; otherwise top_k 0 is all tokens and top_p 0 is unset."""
    got = tokens(runtime_top_k=top_k, runtime_top_p=top_p).request.sampling
    assert (got.top_k, got.top_p) == expected


@pytest.mark.parametrize(
    ("end_id", "ignore_eos", "stop_ids", "ends"),
    [
        (EOS, False, (), {EOS}),
        (-1, True, (), set()),
        (65, True, (65,), {65}),
        # GPT-2's, which the original's clients send to every model: it never comes.
        (50256, True, (), set()),
        (-2, True, (), set()),
    ],
)
@pytest.mark.parametrize("make", [text, tokens])
def test_end_id(make, end_id, ignore_eos, stop_ids, ends):
    made = make(end_id=end_id)
    sampling = made.request.sampling
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (ignore_eos, stop_ids)
    assert made.end_token_ids == ends
    assert made.leaves_out_ends is not ignore_eos


def test_the_prompt():
    assert text().request.prompt == "hi"
    assert text().request.add_special_tokens
    assert tokens().request.prompt == (1, 2, 3)
    assert tokens(input_lengths=2).request.prompt == (1, 2), "what follows is padding"
    assert tokens(input_lengths=36).request.prompt == (1, 2, 3), "the original reads no length"


def test_token_ids_are_clamped_where_the_repository_says_so():
    ids = {"input_ids": [2**31 - 1, 2, -7], "input_lengths": 3, "request_output_len": 5}
    assert converted(TENSORRT_LLM, ids).request.prompt == tuple(ids["input_ids"])
    made = converted(TENSORRT_LLM, ids, options=ModelOptions(clamps_token_ids=True))
    assert made.request.prompt == (258, 2, 0)


def test_the_adapter():
    assert text().request.adapters == ()
    assert text(lora_task_id=0).request.adapters == (AdapterChoice(ByTaskId(0)),)
    top = 2**64 - 1
    assert tokens(lora_task_id=top).request.adapters == (AdapterChoice(ByTaskId(top)),)


def inline(datatype="FP32", **values):
    """`ensemble` with lora_weights [[1, 2]] and lora_config [[1, 0, 8]], or what replaces them."""
    made = {
        "lora_weights": Tensor.of(
            "lora_weights", datatype, np.array([[[1, 2]]], DATATYPES[datatype].wire_dtype)
        ),
        "lora_config": from_values("lora_config", "INT32", [1, 1, 3], [1, 0, 8]),
    }
    given = [t for t in (made | values).values() if t is not None]
    given += tensors(ENSEMBLE, {"text_input": "hi", "max_tokens": 5})
    return of_tensors(ENSEMBLE, given)


def task(task_id):
    return from_values("lora_task_id", "UINT64", [1, 1], [task_id])


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16"])
def test_an_adapter_in_the_request(datatype):
    generation = inline(datatype)
    adapter = generation.inline_adapter
    assert generation.request.adapters == ()
    assert (adapter.weights.dtype, adapter.weights.shape) == (datatype, (1, 2))
    wire = np.array([1, 2], DATATYPES[datatype].wire_dtype).tobytes()
    assert bytes(adapter.weights.view) == wire
    assert (adapter.config.dtype, adapter.config.shape) == ("INT32", (1, 3))
    assert bytes(adapter.config.view) == np.array([1, 0, 8], "<i4").tobytes()
    assert adapter.task_id is None


def test_its_bytes_are_not_copied():
    data = bytearray(12)
    weights = Tensor("lora_weights", "FP16", (1, 2, 3), memoryview(data))
    adapter = inline(lora_weights=weights).inline_adapter
    data[1] = 0x3C
    assert bytes(adapter.weights.view)[:2] == b"\x00\x3c"


@pytest.mark.parametrize("task_id", [0, 7, 2**64 - 1])
def test_an_adapter_in_the_request_and_its_task_id(task_id):
    generation = inline(lora_task_id=task(task_id))
    assert generation.inline_adapter.task_id == task_id
    assert generation.request.adapters == (), "the earlier meaning of the id is not used"


@pytest.mark.parametrize("missing", ["lora_weights", "lora_config"])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("task_id", [None, task(1)])
def test_half_an_adapter(missing, empty, task_id):
    datatype = ENSEMBLE.inputs_by_name[missing].datatype
    half = Tensor.of(missing, datatype, np.zeros((1, 0, 3), DATATYPES[datatype].wire_dtype))
    with pytest.raises(InvalidTensorError) as raised:
        inline(**{missing: half if empty else None, "lora_task_id": task_id})
    assert raised.value.param == missing
    # TensorRT-LLM's text.
    stable = "Request for LoRA inference must have both lora_weights and lora_keys; "
    assert raised.value.message == f"{stable}input '{missing}' is missing or empty"


def test_empty_tensors_are_no_adapter():
    weights = Tensor.of("lora_weights", "FP16", np.zeros((1, 0, 0), np.float16))
    config = Tensor.of("lora_config", "INT32", np.zeros((1, 0, 3), np.int32))
    generation = inline(lora_weights=weights, lora_config=config, lora_task_id=task(3))
    assert generation.inline_adapter is None
    assert generation.request.adapters == (AdapterChoice(ByTaskId(3)),)


def test_what_the_client_wants_to_see():
    plain = text()
    assert not any((plain.is_streamed, plain.excludes_input, plain.returns_log_probs))
    made = text(stream=True, exclude_input_in_output=True, return_log_probs=True)
    assert made.is_streamed
    assert made.excludes_input
    assert made.returns_log_probs
    assert made.request.sampling.logprobs == 0
    assert tokens(return_num_input_tokens=True).returns_num_input_tokens
    assert tokens(return_num_output_tokens=True).returns_num_output_tokens


def test_stop_words():
    sampling = text(stop_words=["", "END", "\n"]).request.sampling
    assert sampling.stop == ("END", "\n")
    assert sampling.include_stop_in_output
    assert text(stop_words="").request.sampling.stop == ()
    # words: (5,), (6, 7), (8,)
    sampling = tokens(stop_words_list=[5, 6, 7, 8, 1, 3, 4, -1]).request.sampling
    assert sampling.stop_token_ids == (), "min_tokens, 1 by default, would keep them away"
    assert sampling.stop_token_sequences == ((5,), (6, 7), (8,))
    assert sampling.include_stop_in_output
    assert tokens(stop_words_list=[0, -1]).request.sampling.stop_token_sequences == ()


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
@pytest.mark.parametrize("token_id", [-1, 259])
def test_words_are_of_the_vocabulary(name, token_id):
    with pytest.raises(TokenOutOfVocabularyError, match=naming(name, token_id, 0, 258)) as e:
        tokens(**{name: [5, token_id, 2, -1]})
    assert e.value.param == name


def test_logits_of_beams_are_refused_under_the_tensor_s_name():
    with pytest.raises(InvalidParameterError, match=r"^input 'return_generation_logits': "):
        tokens(beam_width=2, return_generation_logits=True)


@pytest.mark.parametrize("ends", [[2, 1], [0, -1], [3, -1], [-2, -1], [1, 1]])
def test_a_broken_word_list(ends):
    with refused(InvalidTensorError, "w", 1, "[1, 2]", -1, param="w"):
        split_words("w", np.array([[5, 6], ends]))


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        ("text", {"max_tokens": 0}, "max_tokens"),
        ("tokens", {"request_output_len": -1}, "request_output_len"),
        ("text", {"min_tokens": 9}, "min_tokens"),
        ("text", {"top_k": -2}, "top_k"),
        ("tokens", {"runtime_top_k": -2}, "runtime_top_k"),
        ("tokens", {"runtime_top_p": 1.5}, "runtime_top_p"),
        ("text", {"temperature": float("nan")}, "temperature"),
        ("text", {"num_return_sequences": 0}, "num_return_sequences"),
        ("text", {"stop_words": ["x" * 5000]}, "stop_words"),
        ("text", {"bad_words": ["x" * 5000]}, "bad_words"),
        ("text", {"beam_width": 0}, "beam_width"),
        ("text", {"beam_width": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ("text", {"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ("tokens", {"beam_width": 2, "len_penalty": 1e9}, "len_penalty"),
        ("tokens", {"runtime_top_p_decay": 0.0}, "runtime_top_p_decay"),
        ("tokens", {"runtime_top_p_reset_ids": -2}, "runtime_top_p_reset_ids"),
        ("tokens", {"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ("text", {"num_draft_tokens": 65}, "num_draft_tokens"),
    ],
)
def test_a_bad_value_is_reported_under_its_tensor(kind, values, name):
    with pytest.raises(InvalidParameterError, match=f"^input '{name}': ") as raised:
        {"text": text, "tokens": tokens}[kind](**values)
    assert raised.value.param == name


@pytest.mark.parametrize("length", [0, -1])
def test_input_lengths_are_positive(length):
    with refused(InvalidTensorError, "input_lengths", length, 1, param="input_lengths"):
        tokens(input_lengths=length)


def test_ids_of_the_client():
    made = converted(
        ENSEMBLE,
        {"text_input": "hi", "max_tokens": 5},
        client_request_id="abc",
        timeout_seconds=2.5,
    )
    assert made.request.request_id == 7
    assert made.request.client_request_id == "abc"
    assert made.request.timeout_seconds == 2.5


def test_bytes_that_are_no_text():
    bad = Tensor.of("text_input", "BYTES", np.array([[b"\xff"]], dtype=object))
    limit = from_values("max_tokens", "INT32", [1, 1], [5])
    with refused(InvalidTensorError, "text_input", "UTF-8", 0, param="text_input"):
        of_tensors(ENSEMBLE, [bad, limit])


def test_bad_words():
    assert text(bad_words=["", "rude"]).request.sampling.bad_words == ("rude",)
    sampling = tokens(bad_words_list=[5, 6, 7, 1, 3, -1]).request.sampling
    assert sampling.bad_token_ids == ((5,), (6, 7))


def test_embedding_bias():
    words = {"embedding_bias_words": ["ab", "b", ""], "embedding_bias_weights": [1.0, 0.5, 9.0]}
    assert text(**words).request.sampling.logit_bias == ((97, 1.0), (98, 1.5))
    vector = [0.0] * 259
    vector[3], vector[5] = -1.5, 2.0
    assert tokens(embedding_bias=vector).request.sampling.logit_bias == ((3, -1.5), (5, 2.0))
    assert tokens(embedding_bias=[0.0]).request.sampling.logit_bias == ()
    with refused(InvalidTensorError, 2, 259, "embedding_bias", param="embedding_bias"):
        tokens(embedding_bias=[0.0, 1.0])
    with refused(
        InvalidTensorError,
        1,
        "embedding_bias_weights",
        2,
        "embedding_bias_words",
        param="embedding_bias_weights",
    ):
        text(embedding_bias_words="a", embedding_bias_weights=[1.0, 2.0])


def test_beams_have_the_defaults_of_the_original():
    """All beams come back; no length penalty; over as soon as there are enough of them."""
    assert text(beam_width=1).request.sampling.beam is None
    made = text(beam_width=4)
    assert made.comes_together
    assert made.request.sampling.n == 4
    assert made.request.sampling.beam == BeamSearch(
        width=4, length_penalty=0.0, early_stopping=EarlyStopping.AT_ONCE
    )
    sampling = tokens(
        beam_width=4,
        num_return_sequences=2,
        len_penalty=2.0,
        early_stopping=False,
        beam_search_diversity_rate=0.5,
    ).request.sampling
    assert sampling.n == 2
    assert sampling.beam == BeamSearch(
        width=4,
        length_penalty=2.0,
        diversity_rate=0.5,
        early_stopping=EarlyStopping.WHEN_UNLIKELY,
    )


def test_top_p_that_decays():
    sampling = tokens(
        runtime_top_p=0.75,
        runtime_top_p_min=0.25,
        runtime_top_p_decay=0.5,
        runtime_top_p_reset_ids=9,
        no_repeat_ngram_size=3,
    ).request.sampling
    assert (sampling.top_p_min, sampling.top_p_decay, sampling.top_p_reset_id) == (0.25, 0.5, 9)
    assert sampling.no_repeat_ngram_size == 3
    assert tokens(runtime_top_p_reset_ids=-1).request.sampling.top_p_reset_id is None


@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("json", "", Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ("json_schema", "{}", Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ("regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("ebnf_grammar", "root ::= x", Grammar(GrammarKind.EBNF, "root ::= x")),
        ("", "", None),
    ],
)
@pytest.mark.parametrize("make", [text, tokens])
def test_guided_decoding(make, kind, guide, expected):
    made = make(guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    assert made.request.sampling.grammar == expected
    assert made.leaves_out_ends or expected is None, "a grammar ends with an end token"


def test_half_a_guide():
    for values, message in [
        ({"guided_decoding_guide": "a"}, "needs 'guided_decoding_guide_type'"),
        ({"guided_decoding_guide_type": "regex"}, "needs the guide itself"),
        ({"guided_decoding_guide_type": "xml"}, "it must be one of json, json_schema"),
    ]:
        with pytest.raises(InvalidTensorError, match=message):
            text(**values)


def test_retention():
    assert tokens().request.retention is None
    retention = tokens(
        retention_token_range_starts=[0, 16],
        retention_token_range_ends=[16, -1],
        retention_token_range_priorities=[90, 20],
        retention_token_range_durations_ms=[-1, 500],
        retention_decode_priority=10,
        retention_decode_duration_ms=7,
    ).request.retention
    assert retention == KVRetention(
        (TokenRangeRetention(0, 16, 90, None), TokenRangeRetention(16, None, 20, 500)), 10, 7
    )
    assert text(retention_decode_priority=90).request.retention == KVRetention((), 90)
    with refused(
        InvalidTensorError,
        "2 starts, 1 ends",
        "retention_token_range_starts",
        param="retention_token_range_starts",
    ):
        tokens(retention_token_range_starts=[0, 16], retention_token_range_ends=[16])


def test_lookahead_is_so_many_drafts():
    sizes = dict(zip(LOOKAHEAD, (4, 5, 4), strict=True))
    assert tokens(**sizes).request.sampling.num_draft_tokens == 4
    assert tokens(num_draft_tokens=3).request.sampling.num_draft_tokens == 3
    assert tokens().request.sampling.num_draft_tokens is None
    with refused(InvalidTensorError, "lookahead_ngram_size", param="lookahead_ngram_size"):
        tokens(**{name: size for name, size in sizes.items() if name != LOOKAHEAD[1]})
    with refused(InvalidTensorError, 1, 0, param="lookahead_window_size"):
        tokens(**sizes | {LOOKAHEAD[0]: 0})


LOOKAHEAD = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)


def test_logits_and_metrics():
    made = tokens(
        return_context_logits=True, return_generation_logits=True, return_perf_metrics=True
    )
    assert made.request.sampling.return_prompt_logits
    assert made.request.sampling.return_logits
    assert made.returns_context_logits
    assert made.returns_generation_logits
    assert made.returns_perf_metrics


def test_priority():
    made = converted(ENSEMBLE, {"text_input": "hi", "max_tokens": 5}, priority=-3)
    assert made.request.priority == -3
