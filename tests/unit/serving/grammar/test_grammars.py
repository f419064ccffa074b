"""Grammars at admission: every kind is read, faults are named with their place, once each."""

import asyncio
import json
import threading
import tracemalloc

import pytest

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.grammar.rows import GrammarRows
from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens
from loraplex.serving.grammar.forms import MAX_EBNF_CHARACTERS
from loraplex.serving.grammar.grammars import Grammars
from loraplex.serving.sandbox.process import SandboxProcess
from loraplex.text.tokenizer import Tokenizer, load_tokenizer
from support import tiny_tokenizers
from support.grammar_tokens import (
    EOS,
    TOKENS,
    VOCAB_SIZE,
    allowed,
    row,
    vocabulary,
)
from support.naming import refused

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def check() -> GrammarCheck:
    return GrammarCheck(SpecialTokens({0: b"</s>", 1: b"<eot>"}, VOCAB_SIZE))


INDENTED = r'"type": "object", "x-guidance": {"whitespace_pattern": "\n[ ]{0,8}|[ \t]"}'
"""A schema's own white space, which is served as it is."""


def accepts(check: GrammarCheck, kind: GrammarKind, grammar: str, text: str) -> bool:
    """Whether the text is a whole output of the grammar, in the engine."""
    rows = GrammarRows(VOCAB_SIZE, vocabulary)
    outputs = [TOKENS.index(bytes([byte]), 2) for byte in text.encode()]
    rows.add_row(row(check.compiled(Grammar(kind, grammar)), outputs=outputs))
    (mask,) = allowed(rows)
    rows.close()
    return EOS in mask


@pytest.mark.parametrize(
    ("kind", "grammar", "right", "wrong"),
    [
        ("json_schema", '{"type": "object"}', '{"a": [1, null]}', "[1]"),
        ("json_schema", '{"type": "object"}', '{"a":1,"b": [2, 3]}', '{\n"a":1}'),
        ("json_schema", '{"type": "object"}', '{ "a" : 1 }', '{"a":  1}'),
        ("json_schema", f"{{{INDENTED}}}", '{\n  "a":\t1\n}', '{"a":\n\n1}'),
        ("json_schema", '{"x-guidance": {"whitespace_flexible": false}}', '{"a":1}', '{"a": 1}'),
        ("json_schema", '{"enum": ["a", 1.5]}', '"a"', '"b"'),
        ("regex", "[a-z]{2}|7", "ab", "abc"),
        ("regex", "^[a-z]/b$", "a/b", "a/bc"),
        ("choice", '["yes", "no\\n\\"quoted\\"", ""]', 'no\n"quoted"', "ye"),
        ("choice", '["yes", ""]', "", "y"),
        ("choice", '["a|b", "日😀"]', "日😀", "a"),
        ("lark", 'start: "a" NUM\nNUM: /[0-9]+/', "a12", "a"),
        ("ebnf", 'root ::= "a" num\nnum ::= [0-9]+', "a12", "a"),
        ("ebnf", JSON_GBNF, '{"a": [1, true]}', '{"a": [1, true]'),
        ("ebnf", r'root ::= "\u0041" [\u0042-\u0044] "\\u0041"', "AC\\u0041", "ACA"),
        ("ebnf", 'start: "a lark grammar"', "a lark grammar", "a"),
        ("llguidance", '{"grammars": [{"lark_grammar": "start: /a+/"}]}', "aa", "b"),
    ],
)
def test_every_kind_becomes_what_the_engine_matches(check, kind, grammar, right, wrong):
    assert check.compiled(Grammar(GrammarKind(kind), grammar)).kind is GrammarKind.LLGUIDANCE
    assert accepts(check, GrammarKind(kind), grammar, right)
    assert not accepts(check, GrammarKind(kind), grammar, wrong)


def nested(schema: str) -> str:
    return f'{{"properties": {{"not": {{"items": {schema}}}, "b": {{"type": "null"}}}}}}'


PLACE = "at #/properties/not/items: "


@pytest.mark.parametrize(
    ("kind", "grammar", "message"),
    [
        ("json_schema", "{", "JSON schema is not valid: it is not JSON"),
        ("json_schema", "[1]", "it must be an object, got [1]"),
        ("json_schema", '{"items":' * 300 + "{}" + "}" * 300, "nested too deep"),
        ("json_schema", "[" * 100_000, "nested too deep"),
        ("json_schema", nested('{"uniqueItems": true}'), f'{PLACE}the keyword is not supported: "'),
        ("json_schema", nested('{"if": {}, "then": {}}'), f"{PLACE}the keywords are not supported"),
        ("json_schema", nested('{"type": "objct"}'), f"{PLACE}Invalid type: objct"),
        ("json_schema", nested('{"type": "string", "pattern": "("}'), f"{PLACE}regex parse error"),
        (
            "json_schema",
            nested('{"type": "string", "format": "x"}'),
            f'{PLACE}the format is not supported: "x"',
        ),
        ("json_schema", '{"enum": []}', "at #: Unsatisfiable schema"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "at #: Pointer '/$defs/none' does not exist"),
        ("json_schema", '{"$ref": "http://x.test/y"}', "does not fetch resources"),
        ("json_schema", '{"$ref": "#"}', "no text matches it"),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', '"not"'),
        ("json_schema", '{"anyOf": [{}, {"contains": {}}]}', "at #/anyOf/1: "),
        ("regex", "(", "the regular expression is not valid: regex parse error"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(a{1000}){1000}", "too many expressions"),
        ("choice", "[]", "the list of choices is not valid: it is empty"),
        ("choice", '{"a": 1}', "must be a list of strings"),
        ("choice", '["a", 1]', "must be a list of strings"),
        ("choice", "a", "it is not JSON"),
        ("lark", "start: x", "at 1(8): unknown name"),
        ("lark", "start: <|nope|>", "unknown special token"),
        ("lark", 'start: %json {"uniqueItems": true}', '"uniqueItems"'),
        ("ebnf", 'root ::= "a', "the EBNF grammar is not valid: Unexpected end of input"),
        ("ebnf", "root ::= x", "Rule 'x' not found"),
        ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deep"),
        ("ebnf", "root ::= " + " " * MAX_EBNF_CHARACTERS, "at most 65536 are allowed"),
        ("llguidance", '{"grammars": []}', "llguidance grammar is not valid: empty grammars array"),
        ("llguidance", "nonsense", "llguidance grammar is not valid"),
    ],
)
def test_a_fault_is_the_clients_error_and_says_where_it_is(check, kind, grammar, message):
    with pytest.raises((InvalidParameterError, UnsupportedFeatureError)) as caught:
        check.compiled(Grammar(GrammarKind(kind), grammar))

    assert message in str(caught.value)
    is_unsupported = isinstance(caught.value, UnsupportedFeatureError)
    assert f"is not {'supported' if is_unsupported else 'valid'}: " in str(caught.value)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 1000, "no dump of the grammar"


def test_a_lark_grammar_may_name_a_special_token(check):
    check.compiled(Grammar(GrammarKind.LARK, 'start: "a" <eot>'))


def test_a_keyword_that_llguidance_would_ignore_is_an_error_in_its_own_form_too(check):
    lenient = {"uniqueItems": True, "x-guidance": {"lenient": True}}
    text = json.dumps({"grammars": [{"json_schema": lenient}]})

    with refused(UnsupportedFeatureError, "uniqueItems", param="grammar"):
        check.compiled(Grammar(GrammarKind.LLGUIDANCE, text))


async def test_a_request_without_a_grammar_passes(tokenizer):
    sampling = SamplingParams()
    assert await Grammars(tokenizer).compiled(sampling) is sampling


async def test_a_grammar_is_compiled_once_and_not_on_the_event_loop(tokenizer, monkeypatch):
    threads = []
    run = SandboxProcess.run

    def counted(self: SandboxProcess, task: bytes) -> bytes:
        threads.append(threading.current_thread())
        return run(self, task)

    monkeypatch.setattr(SandboxProcess, "run", counted)
    grammars = Grammars(tokenizer)
    sampling = SamplingParams(max_tokens=5, grammar=Grammar(GrammarKind.REGEX, "a+"))

    first = await grammars.compiled(sampling)
    second = await grammars.compiled(sampling)

    assert first == second
    assert first.max_tokens == 5
    assert first.grammar.kind is GrammarKind.LLGUIDANCE
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    grammars.close()


async def test_what_was_refused_is_refused_again(tokenizer):
    grammars = Grammars(tokenizer)
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "("))

    results = await asyncio.gather(
        *(grammars.compiled(sampling) for _ in range(3)), return_exceptions=True
    )

    assert [type(result) for result in results] == [InvalidParameterError] * 3
    grammars.close()


async def test_what_is_remembered_is_bounded(tokenizer):
    grammars = Grammars(tokenizer)
    for index in range(100):
        text = f'start: "a" "{index}"\n// {"long " * 20_000}'
        await grammars.compiled(SamplingParams(grammar=Grammar(GrammarKind.LARK, text)))

    assert grammars.num_remembered < 50
    grammars.close()


def test_of_short_grammars_no_more_memory_is_remembered(tokenizer):
    """Their objects take several times as much as their characters."""
    grammars = Grammars(tokenizer)
    tracemalloc.start()
    for index in range(40_000):
        form = Grammar(GrammarKind.LLGUIDANCE, f"the form of {index} {'x' * 80}")
        grammars._remember(Grammar(GrammarKind.REGEX, f"number {index}"), form)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grammars.num_remembered > 0
    assert num_bytes < 1.5 * (1 << 23)
    grammars.close()


async def test_a_grammar_that_is_too_long_is_refused(tokenizer):
    grammar = Grammar(GrammarKind.LARK, "a" * (MAX_GRAMMAR_CHARACTERS + 1))

    with refused(InvalidParameterError, 131073, 131072, param="grammar"):
        await Grammars(tokenizer).compiled(SamplingParams(grammar=grammar))
