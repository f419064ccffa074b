"""Masks and draft tokens of constrained rows: allowed tokens, ends, and failures."""

import concurrent.futures
import dataclasses
import itertools
import random
import re
import threading
import time
from collections.abc import Sequence

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.plan import RowStep, Wanted
from loraplex.execution.grammar import matcher
from loraplex.execution.grammar.compiler import GrammarCompiler, GrammarVocabulary
from loraplex.execution.grammar.matcher import RowMatcher
from loraplex.execution.grammar.rows import GrammarRows
from support.grammar_tokens import (
    EOS,
    EOT,
    TOKENS,
    VOCAB_SIZE,
    allowed,
    decode_step,
    decoded,
    encode,
    ids_of,
    regex,
    row,
    schema,
    vocabulary,
)
from support.naming import naming

NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def rows():
    made = GrammarRows(VOCAB_SIZE, vocabulary)
    yield made
    made.close()


def test_only_what_goes_on_within_the_grammar_may_come(rows):
    rows.add_row(row(regex("(abd|12)")))

    assert allowed(rows) == [ids_of(b"a", b"ab", b"1", b"12")]


def test_an_output_ends_exactly_where_the_grammar_accepts(rows):
    rows.add_row(row(regex("ab?")))

    assert EOS not in allowed(rows)[0]
    rows.accept(0, encode("a"))
    assert allowed(rows) == [ids_of(b"b") | {EOS}]
    rows.accept(0, encode("b"))
    assert allowed(rows) == [{EOS}], "nothing else may follow"


def test_each_row_has_its_own_end_tokens(rows):
    rows.add_row(row(regex("a"), slot=0, ends=(EOS, EOT)))
    rows.add_row(row(regex("a"), slot=1, ends=(*ids_of(b"z"),)))
    for slot in (0, 1):
        allowed(rows, slot)
        rows.accept(slot, encode("a"))

    assert allowed(rows, 0) == [{EOS, EOT}]
    assert allowed(rows, 1) == [ids_of(b"z")]


def test_an_end_token_that_is_text_is_only_the_end(rows):
    rows.add_row(row(regex("a[xz]?"), ends=(*ids_of(b"z"),)))

    allowed(rows)
    rows.accept(0, encode("a"))
    assert allowed(rows) == [ids_of(b"x", b"z")]
    rows.accept(0, encode("x"))
    assert allowed(rows) == [ids_of(b"z")]
    rows.remove_row(0)
    rows.add_row(row(regex("[az]x"), ends=(*ids_of(b"z"),)))
    assert allowed(rows) == [ids_of(b"a")], "it is no text before the end"


@pytest.mark.parametrize("held_back", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_the_end_waits_while_something_else_may_follow(rows, held_back):
    rows.add_row(row(regex("a{1,2}"), **held_back))

    allowed(rows)
    rows.accept(0, encode("a"))
    assert allowed(rows) == [ids_of(b"a")]
    rows.accept(0, encode("a"))
    assert allowed(rows) == [{EOS}], "the grammar is over: it ends, whatever was requested"


def test_min_tokens_hold_the_end_back_no_longer_than_they_say(rows):
    rows.add_row(row(regex("a*"), min_tokens=2))

    assert EOS not in allowed(rows)[0]
    rows.accept(0, encode("a"))
    assert EOS not in allowed(rows)[0]
    rows.accept(0, encode("a"))
    assert EOS in allowed(rows)[0]


def test_a_row_that_joins_again_goes_on_where_it_was(rows):
    rows.add_row(row(regex("ab1[23]"), outputs=encode("ab")))

    assert allowed(rows) == [ids_of(b"1", b"12")]


def test_tokens_of_the_plan_are_consumed(rows):
    """A beam's row gets its token by its next step."""
    rows.add_row(row(regex("abx|1y")))
    new = encode("ab")
    step = RowStep(slot=0, start=0, num_tokens=3 + len(new), token_ids=(5, 6, 7, *new))

    rows.begin([step])
    rows.bitmasks([(0, ())])

    assert allowed(rows) == [ids_of(b"x")]


def test_a_chunk_of_the_prompt_waits_for_no_mask(rows):
    rows.add_row(row(regex("a")))

    rows.begin([RowStep(slot=0, start=0, num_tokens=2, wanted=Wanted.NONE)])
    rows.begin([RowStep(slot=0, start=0, num_tokens=2, wanted=Wanted.ALL)])

    with pytest.raises(AssertionError, match=naming("step")):
        rows.bitmasks([(0, ())])


def test_a_mask_for_every_draft(rows):
    rows.add_row(row(regex("a[bc]1[23]")))

    drafts = (*encode("ab"), *encode("1"), *encode("2"))
    before, after_ab, after_1, after_2 = allowed(rows, drafts=drafts)

    assert before == ids_of(b"a", b"ab")
    assert after_ab == ids_of(b"1", b"12")
    assert after_1 == ids_of(b"2", b"3")
    assert after_2 == {EOS}
    assert allowed(rows) == [before], "drafts are only tried"


def test_nothing_is_computed_after_a_wrong_draft(rows):
    rows.add_row(row(regex("a+")))

    masks = allowed(rows, drafts=(*encode("a"), *encode("x"), *encode("a"), VOCAB_SIZE + 5))

    assert masks[1] == masks[0] | {EOS}
    assert masks[2:] == [set(), set(), set()]
    assert rows.problem(0) is None
    assert allowed(rows) == [masks[0]]


def test_nothing_is_computed_after_a_drafted_end(rows):
    rows.add_row(row(regex("a")))

    masks = allowed(rows, drafts=(*encode("a"), EOS, EOS))

    assert masks[:2] == [ids_of(b"a"), {EOS}]
    assert rows.problem(0) is None
    assert rows.accept(0, (*encode("a"), EOS)) == (), "what has ended forces nothing"
    assert allowed(rows) == [{EOS}]


def test_forced_text_becomes_draft_tokens(rows):
    rows.add_row(row(schema(NAMED)))
    allowed(rows)

    forced = rows.accept(0, encode('{"'))

    assert decoded(forced) == b'name":', "a quote may be the start of a longer token"
    assert forced == tuple(encode('name":')), "as the model's own tokenizer cuts it"
    assert allowed(rows, drafts=forced)[0] == {forced[0]}
    rows.accept(0, (*forced, *encode('"')))
    assert decoded(rows.accept(0, encode('bob"'))) == b',"age":'


def test_the_end_is_drafted_where_nothing_else_may_follow(rows):
    rows.add_row(row(regex("ab"), ends=(EOT, EOS)))
    allowed(rows)

    assert rows.accept(0, encode("ab")) == (EOT,)


def test_no_draft_tokens_without_fast_forward():
    rows = GrammarRows(VOCAB_SIZE, vocabulary, fast_forward=False)
    rows.add_row(row(schema(NAMED)))
    allowed(rows)

    assert rows.accept(0, encode('{"')) == ()
    rows.close()


@pytest.mark.parametrize("is_slow", [False, True])
def test_masks_depend_on_the_tokens_only(rows, monkeypatch, is_slow):
    """Rejected drafts, requested drafts and a copy of a used grammar change nothing, nor does the
    time that masks take."""
    monkeypatch.setattr(matcher, "_SLOW_SECONDS", -1.0 if is_slow else 60.0)
    draw = random.Random(3)
    grammar = schema(NAMED)
    for case in range(30):
        rows.add_row(row(grammar))
        outputs = []
        for _ in range(25):
            (mask,) = allowed(rows)
            rows.add_row(row(grammar, slot=1, outputs=outputs))
            assert allowed(rows, slot=1) == [mask], (case, decoded(outputs))
            rows.remove_row(1)
            drafts = [draw.choice(sorted(mask)), *draw.choices(range(VOCAB_SIZE), k=3)]
            assert allowed(rows, drafts=drafts)[0] == mask, (case, decoded(outputs))
            outputs.append(draw.choice(sorted(mask)))
            rows.accept(0, outputs[-1:])
            if outputs[-1] == EOS:
                break
        rows.remove_row(0)


def test_a_row_that_cannot_go_on_says_why(rows):
    poor = GrammarVocabulary((b"</s>", b"a"), frozenset({0}), lambda text: [1] * len(text))
    rows = GrammarRows(2, lambda: poor)
    rows.add_row(row(regex("ab")))
    allowed(rows)
    rows.accept(0, (1,))

    assert allowed(rows) == [set()]
    assert "grammar" in rows.problem(0).message
    assert rows.problem(0).param == "grammar"
    rows.close()


def test_a_grammar_that_is_too_large_fails_its_row_alone(rows):
    rows.add_row(row(regex("a{1000000}"), slot=0))
    rows.add_row(row(regex("ab"), slot=1))
    allowed(rows, 0)
    rows.accept(0, encode("a"))

    rows.begin([decode_step(0), decode_step(1)])
    large, small = rows.bitmasks([(0, ()), (1, ())])

    assert not large.any()
    assert re.search(naming(1), rows.problem(0).message)
    assert "\n" not in rows.problem(0).message, "no dump of the parser"
    assert small.any()
    assert rows.problem(1) is None


def test_a_grammar_that_takes_the_processor_for_long_fails_its_row(rows, monkeypatch):
    monkeypatch.setattr(time, "thread_time", itertools.count(step=0.3).__next__)
    rows.add_row(row(regex("a*")))

    while EOS in allowed(rows)[0]:
        rows.accept(0, encode("a"))

    assert re.search(naming(1, 1.0), rows.problem(0).message)


def test_a_machine_that_stands_still_once_fails_no_row(rows, monkeypatch):
    times = itertools.chain((0.0, 60.0), itertools.count(60.0, 0.001))
    monkeypatch.setattr(time, "thread_time", times.__next__)
    rows.add_row(row(regex("a*")))

    for _ in range(20):
        assert EOS in allowed(rows)[0]
        rows.accept(0, encode("a"))


def test_a_token_outside_the_grammar_is_the_rows_problem(rows):
    rows.add_row(row(regex("ab"), outputs=encode("x")))

    assert allowed(rows) == [set()]
    assert re.search(naming("x"), rows.problem(0).message)


def test_without_a_tokenizer_a_constrained_row_is_refused_by_name():
    rows = GrammarRows(VOCAB_SIZE, None)
    rows.add_row(row(regex("ab")))

    assert allowed(rows) == [set()]
    assert re.search(naming("tokenizer"), rows.problem(0).message)
    rows.close()


def test_a_tokenizer_that_cannot_be_read_fails_the_rows_and_not_the_step():
    def unreadable() -> GrammarVocabulary:
        raise ConfigError("tokenizer.json is broken")

    def broken() -> GrammarVocabulary:
        raise KeyError("vocab")

    for source, message in ((unreadable, "is broken"), (broken, "vocab")):
        rows = GrammarRows(VOCAB_SIZE, source)
        for slot in (0, 1):
            rows.add_row(row(regex("ab"), slot=slot))
            assert allowed(rows, slot) == [set()]
            assert message in rows.problem(slot).message
        rows.close()


class Panic(BaseException):
    """Stands for pyo3_runtime.PanicException, which is no Exception either."""


FAILING_CALLS = {
    "compile": (GrammarCompiler, "matcher"),
    "join": (RowMatcher, "__init__"),
    "fill": (RowMatcher, "fill"),
    "accept": (RowMatcher, "accept"),
    "draft": (RowMatcher, "forced"),
}


@pytest.mark.parametrize("error", [ValueError, Panic])
@pytest.mark.parametrize("call", FAILING_CALLS)
def test_whatever_fails_in_one_row_ends_that_row_only(rows, monkeypatch, call, error):
    """A step has rows of all tenants."""
    rows.add_row(row(regex("[ab]c"), slot=0))
    assert allowed(rows, 0) == [ids_of(b"a", b"b")]
    kind, method = FAILING_CALLS[call]
    original, failing = getattr(kind, method), []

    def fail_once(*args):
        if failing:
            failing.clear()
            raise error("planted")
        return original(*args)

    monkeypatch.setattr(kind, method, fail_once)
    has_begun = call in ("accept", "draft")
    failing.extend([] if has_begun else [True])
    rows.add_row(row(regex("[ab]c"), slot=1))
    if has_begun:
        assert allowed(rows, 1) == [ids_of(b"a", b"b")]
        failing.append(True)
        assert rows.accept(1, encode("a")) == ()
    assert allowed(rows, 1) == [set()]
    assert rows.problem(1).code == "internal_error"
    assert "planted" not in rows.problem(1).message
    assert rows.problem(0) is None
    rows.accept(0, encode("a"))
    assert allowed(rows, 0) == [ids_of(b"c")]


def test_a_tokenizer_that_raises_ends_no_row(caplog):
    """Its result is a preference: the vocabulary alone can spell any text."""

    def raising(text):
        raise ValueError("planted")

    rows = GrammarRows(VOCAB_SIZE, lambda: dataclasses.replace(vocabulary(), encode=raising))
    rows.add_row(row(regex("abab")))
    assert allowed(rows)[0]
    rows.accept(0, encode("a"))
    assert allowed(rows)[0]
    assert rows.problem(0) is None
    assert "cannot encode" in caplog.text
    rows.close()


def test_the_tokenizer_is_read_with_the_first_constrained_row():
    reads = []
    rows = GrammarRows(VOCAB_SIZE, lambda: reads.append(threading.current_thread()) or vocabulary())

    rows.add_row(row(None))
    rows.begin([decode_step()])
    assert not reads
    rows.add_row(row(regex("a"), slot=1))
    allowed(rows, 1)
    rows.add_row(row(regex("b"), slot=2))
    allowed(rows, 2)

    assert len(reads) == 1
    assert reads[0] is not threading.current_thread()
    rows.close()


def test_masks_are_filled_beside_the_caller():
    """`begin` comes back though the tokenizer is not there yet."""
    may_read = threading.Event()

    def slow() -> GrammarVocabulary:
        assert may_read.wait(timeout=60)
        return vocabulary()

    rows = GrammarRows(VOCAB_SIZE, slow)
    rows.add_row(row(regex("a")))
    rows.begin([decode_step()])
    may_read.set()

    assert rows.bitmasks([(0, ())]).any()
    rows.close()


def test_a_step_does_not_wait_for_a_long_compilation(rows):
    """Masks of a row that has its grammar are filled meanwhile, and those of the other one later
    serve the step that comes then."""
    goes_on = threading.Event()
    rows.add_row(row(regex("a"), slot=0))
    first = allowed(rows, 0)
    rows._compiling.submit(goes_on.wait, 60)  # as a large grammar would
    rows.add_row(row(regex("b"), slot=1))

    for _ in range(3):
        rows.begin([decode_step(0), decode_step(1)])
        assert rows.unready([0, 1], has_others=False) == {1}
        assert rows.bitmasks([(0, ())]).any()
    goes_on.set()
    while rows.unready([1], has_others=False):
        pass
    rows.begin([decode_step(1)])

    assert not rows.unready([1], has_others=False)
    assert allowed(rows, 0) == first
    assert allowed(rows, 1) == [ids_of(b"b")]


def test_no_step_with_other_rows_waits_twice_for_a_mask(rows, request, monkeypatch):
    goes_on = threading.Event()
    request.addfinalizer(goes_on.set)
    rows._compiling.submit(goes_on.wait, 60)
    rows.add_row(row(regex("a"), slot=0))
    rows.begin([decode_step(0)])
    assert rows.unready([0], has_others=True) == {0}
    waits = []
    wait = concurrent.futures.wait
    monkeypatch.setattr(
        concurrent.futures,
        "wait",
        lambda masks, *rest: waits.append([*masks]) or wait(masks, *rest),
    )

    rows.begin([decode_step(0)])
    assert rows.unready([0], has_others=True) == {0}
    assert not waits
    assert rows.unready([0], has_others=False) == {0}
    assert len(waits) == 1, "nothing else is to be done"


@pytest.mark.parametrize("token", ["a", "x"])
def test_the_thread_of_the_masks_accepts_what_comes_after_slow_ones(rows, monkeypatch, token):
    """llguidance holds the interpreter, and so would a step, while it consumes such a token."""
    monkeypatch.setattr(matcher, "_SLOW_SECONDS", -1.0)
    accept, threads = RowMatcher.accept, []

    def noted(self: RowMatcher, token_ids: Sequence[int]) -> None:
        if token_ids:
            threads.append(threading.current_thread())
        accept(self, token_ids)

    monkeypatch.setattr(RowMatcher, "accept", noted)
    rows.add_row(row(regex("a[bd]")))
    allowed(rows)

    assert rows.accept(0, encode(token)) == (), "and forces nothing"
    assert allowed(rows) == [ids_of(b"b", b"d") if token == "a" else set()]
    assert (rows.problem(0) is None) == (token == "a")
    assert threads
    assert threading.current_thread() not in threads


def test_rows_of_another_tenant_wait_for_no_grammar_and_no_mask(rows, request):
    goes_on = threading.Event()
    request.addfinalizer(goes_on.set)
    for pool in (rows._compiling, rows._filling):
        for _ in range(10):
            pool.submit_for("hostile", goes_on.wait, 60)
    rows.add_row(row(regex("(abd|12)"), tenant="quiet"))

    assert allowed(rows) == [ids_of(b"a", b"ab", b"1", b"12")]
    rows.accept(0, encode("12"))
    assert allowed(rows) == [{EOS}]


def test_a_row_that_leaves_is_not_compiled(rows, monkeypatch):
    goes_on = threading.Event()
    rows._compiling.submit(goes_on.wait, 60)
    compiled = []
    monkeypatch.setattr(RowMatcher, "__init__", lambda *_: compiled.append(1))
    rows.add_row(row(regex("b")))
    rows.begin([decode_step()])
    rows.remove_row(0)
    goes_on.set()
    rows.close()

    assert not compiled


def test_several_ranks_wait_for_every_mask():
    may_read = threading.Event()

    def slow() -> GrammarVocabulary:
        assert may_read.wait(timeout=60)
        return vocabulary()

    rows = GrammarRows(VOCAB_SIZE, slow, defers=False)
    rows.add_row(row(regex("a")))
    rows.begin([decode_step()])
    threading.Timer(0.05, may_read.set).start()

    assert not rows.unready([0], has_others=False)
    rows.close()


def test_bits_beyond_the_vocabulary_are_never_set(rows):
    rows.add_row(row(regex("(?s).*")))

    (mask,) = allowed(rows)

    assert mask == {i for i, token in enumerate(TOKENS) if i > EOT} - {
        i for i, token in enumerate(TOKENS[2:258], 2) if token[0] in _NEVER_FIRST
    } | {EOS}


_NEVER_FIRST = {*range(0x80, 0xC2), *range(0xF5, 0x100)}
"""Bytes that begin no character."""
