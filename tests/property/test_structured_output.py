"""Whatever a model with random weights writes, it keeps to its grammar; and the output depends on
nothing but model, prompt and parameters."""

import collections
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema
import pytest

from loraplex import LLM, SamplingParams
from loraplex.app.llm_outputs import Completion
from loraplex.bench.random_adapters import AdapterKind, linear_shapes, write_random_adapter
from loraplex.core.beam_search import BeamSearch
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import FinishReason
from loraplex.execution.grammar.matcher import RowMatcher
from support.examples import num_examples
from support.random_schemas import RandomRegexes, RandomSchemas, Schema
from support.tiny_text_model import write_tiny_text_model

FAMILIES = ("byte-level", "llama3", "llama-sentencepiece")
MAX_TOKENS = 1800


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request, tmp_path_factory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_text_model(folder, request.param)
    with LLM(str(folder), state_dir=str(folder / "state"), num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_text_model(tmp_path_factory.mktemp("model"), "byte-level", seed=1)


def test_outputs_validate_against_random_schemas(llm):
    check_schemas(llm, seed=0, count=num_examples(0.4))


@pytest.mark.slow
def test_outputs_of_many_schemas_validate(llm):
    check_schemas(llm, seed=1000, count=num_examples(5))


def check_schemas(llm: LLM, *, seed: int, count: int) -> None:
    """Generate for every schema at temperature 0 or 1, in one batch."""
    random_schemas = RandomSchemas(seed)
    schemas = [random_schemas.schema() for _ in range(count)]
    outputs = llm.generate(
        ["The answer is"] * count,
        [as_json(schema, temperature=i % 2, seed=i) for i, schema in enumerate(schemas)],
    )
    reasons = collections.Counter(output.finish_reason for output in outputs)
    valid = [
        is_valid(output.text, schema)
        for output, schema in zip(outputs, schemas, strict=True)
        if output.finish_reason is FinishReason.STOP
    ]
    assert (sum(valid), reasons[FinishReason.LENGTH]) == (count, 0), "(valid, cut)"


def is_valid(text: str, schema: Schema) -> bool:
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.validate(json.loads(text), schema, format_checker=checker)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{text!r} does not match {json.dumps(schema)}: {error}")
        return False
    return True


def as_json(schema: Schema, **sampling) -> SamplingParams:
    return constrained(GrammarKind.JSON_SCHEMA, json.dumps(schema), **sampling)


def constrained(kind: GrammarKind, text: str, **sampling) -> SamplingParams:
    settings = {"max_tokens": MAX_TOKENS, "seed": 0, **sampling}
    return SamplingParams(grammar=Grammar(kind, text), **settings)


def test_outputs_match_random_regular_expressions(llm):
    random_regexes = RandomRegexes(0)
    patterns = [random_regexes.regex() for _ in range(num_examples(0.6))]

    outputs = llm.generate(
        ["Go:"] * len(patterns),
        [constrained(GrammarKind.REGEX, text, seed=i) for i, text in enumerate(patterns)],
    )

    for pattern, output in zip(patterns, outputs, strict=True):
        assert re.fullmatch(pattern, output.text), (pattern, output.text)
        assert output.finish_reason is FinishReason.STOP


def test_outputs_are_one_of_random_choices(llm):
    random_regexes = RandomRegexes(1)
    choices = [random_regexes.choices() for _ in range(num_examples(0.6))]

    outputs = llm.generate(
        ["Go:"] * len(choices),
        [
            constrained(GrammarKind.CHOICE, json.dumps(texts), seed=i, temperature=1.5)
            for i, texts in enumerate(choices)
        ],
    )

    for texts, output in zip(choices, outputs, strict=True):
        assert output.text in texts
        assert output.finish_reason is FinishReason.STOP


def test_every_choice_can_come(llm):
    texts = ["a", "ab", "abc", ""]

    (output,) = llm.generate(
        ["Go:"],
        constrained(GrammarKind.CHOICE, json.dumps(texts), n=100, temperature=5.0),
    )

    assert {completion.text for completion in output.completions} == set(texts)


PROMPTS = ("Hello", "What is the capital of France?", [7, 8, 9] * 30)
SCHEMAS = tuple(RandomSchemas(77).schema() for _ in range(8))
TEXTS = tuple(PROMPTS[i % len(PROMPTS)] for i in range(len(SCHEMAS)))
BLOCK_BYTES = 2 * 2 * 2 * 4 * 16 * 4
"""Layers, keys and values, KV heads, head size, tokens, bytes: of one block of the model."""


def mixed() -> list[SamplingParams]:
    """Greedy and drawn, with a grammar and without, with penalties and log probabilities."""
    return [
        as_json(schema, temperature=i % 2, seed=i, logprobs=1, max_tokens=340)
        if i % 4 != 3
        else SamplingParams(max_tokens=60, seed=i, repetition_penalty=1.2, logprobs=1)
        for i, schema in enumerate(SCHEMAS)
    ]


def completions_of(llm: LLM, params: Sequence[SamplingParams]) -> list[Completion]:
    outputs = llm.generate(list(TEXTS[: len(params)]), params)
    return [as_tuple(completion) for output in outputs for completion in output.completions]


@pytest.fixture(scope="module")
def usual(folder) -> Iterator[LLM]:
    """The model with the default settings. Its engine is a thread of this process."""
    with LLM(str(folder), state_dir=str(folder / "usual"), num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(usual) -> list[Completion]:
    """The outputs for `mixed()` with the default settings."""
    return completions_of(usual, mixed())


def as_tuple(completion: Completion) -> tuple:
    chosen = tuple(round(logprob.logprob, 3) for logprob in completion.logprobs)
    return completion.text, completion.token_ids, completion.finish_reason, chosen


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_draft_tokens": 4},
        {"overlap": True},
        {"enable_prefix_cache": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_outputs_do_not_depend_on_how_they_were_computed(folder, expected, settings):
    """Generated alone, in chunks, with prompt lookup, planned ahead."""
    with LLM(str(folder), state_dir=str(folder / "state"), num_threads=1, **settings) as opened:
        assert completions_of(opened, mixed()) == expected


def test_a_preempted_sequence_goes_on_within_its_grammar(folder, expected):
    """The KV cache holds little more than one sequence of the model's length."""
    with LLM(
        str(folder),
        state_dir=str(folder / "state"),
        num_threads=1,
        max_model_len=448,
        kv_cache_bytes=32 * BLOCK_BYTES,
        enable_prefix_cache=False,
    ) as opened:
        outputs = opened.generate(list(TEXTS) * 4, mixed() * 4)
        assert opened.stats().preemptions > 0

    found = [as_tuple(output.completions[0]) for output in outputs]
    assert found == expected * 4


@pytest.mark.parametrize("drafts", ["none", "random", "shifted"])
def test_draft_tokens_change_no_token(usual, expected, drafts, monkeypatch):
    forced = RowMatcher.forced
    draw = random.Random(0)

    def wrong(self: RowMatcher) -> tuple[int, ...]:
        match drafts:
            case "none":
                return ()
            case "random":
                return tuple(draw.choices(range(500), k=draw.randint(0, 5)))
            case _:
                right = forced(self)
                return (*right[:1], *right[2:])

    monkeypatch.setattr(RowMatcher, "forced", wrong)

    assert completions_of(usual, mixed()) == expected


def test_forced_text_takes_fewer_steps(usual, monkeypatch):
    """The draft tokens are right where the grammar leaves one text only."""
    text = json.dumps(["a text that is long, and the only one that there is"])
    params = [constrained(GrammarKind.CHOICE, text, temperature=0)]

    def steps() -> int:
        before = usual.stats().steps
        (output,) = usual.generate(["Go:"], params)
        assert output.text == json.loads(text)[0]
        return usual.stats().steps - before

    with_drafts = steps()
    monkeypatch.setattr(RowMatcher, "forced", lambda self: ())

    assert with_drafts < steps() / 3


def test_every_one_of_n_outputs_keeps_to_the_grammar(usual):
    schema = SCHEMAS[0]
    outputs = completions_of(usual, [as_json(schema, n=6, temperature=1.5)])

    assert len({token_ids for _, token_ids, _, _ in outputs}) > 1
    assert all(is_valid(text, schema) for text, *_ in outputs)


def test_logprobs_are_of_the_models_own_distribution(usual):
    """Not of what the grammar leaves of it: there a forced token would have probability 1."""
    outputs = completions_of(
        usual, [constrained(GrammarKind.CHOICE, '["only"]', temperature=0, logprobs=0)]
    )

    assert max(outputs[0][3]) < -0.01


def test_beams_keep_to_the_grammar(usual):
    schema = SCHEMAS[1]
    sampling = as_json(schema, temperature=0, n=3, beam=BeamSearch(width=3))

    outputs = completions_of(usual, [sampling])

    assert len(outputs) == 3
    assert all(is_valid(text, schema) for text, *_ in outputs)


def test_every_adapter_keeps_to_its_requests_grammar(folder, tmp_path):
    """Base and two adapters in one batch: different outputs, all of the same form."""
    kind = AdapterKind(rank=4, alpha=8, b_scale=1.0)
    adapters = {name: str(tmp_path / name) for name in ("one", "two")}
    for seed, path in enumerate(adapters.values()):
        write_random_adapter(Path(path), linear_shapes(folder), kind, seed=(seed,))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 8, "maxLength": 12}},
        "required": ["a"],
        "additionalProperties": False,
    }

    with LLM(str(folder), adapters, state_dir=str(tmp_path / "state"), num_threads=1) as opened:
        names = [None, "one", "two"]
        together = opened.generate(["Hello"] * 3, as_json(schema, temperature=0), adapter=names)
        alone = [
            opened.generate("Hello", as_json(schema, temperature=0), adapter=name)[0]
            for name in names
        ]

    assert all(is_valid(output.text, schema) for output in together)
    assert len({output.text for output in together}) == 3
    assert [output.text for output in together] == [output.text for output in alone]
