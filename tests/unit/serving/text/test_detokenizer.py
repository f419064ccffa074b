"""Cases of detokenization by example; random texts and splits are in tests/property."""

import pytest

from loraplex.core.errors import UnsupportedModelError
from loraplex.serving.text.detokenizer import IncrementalDetokenizer, continuation
from loraplex.text.token_decoding import (
    StreamReplacer,
    TextStream,
    Vocabulary,
    parse_decoder,
)
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.naming import naming


@pytest.fixture
def byte_level(tmp_path):
    return load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))


@pytest.fixture
def llama(tmp_path):
    return load_tokenizer(tiny_tokenizers.write_llama_sentencepiece(tmp_path))


def test_a_character_waits_for_its_last_byte(byte_level):
    ids = byte_level.encode("བ", add_special_tokens=False)
    assert len(ids) == 3
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "བ"]
    assert detokenizer.push([], final=True) == ""


def test_half_a_character_at_the_end(byte_level):
    ids = byte_level.encode("aབ", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.push([], final=True) == "\ufffd"


def test_half_a_character_before_another_token(llama):
    half = llama.encode("བ", add_special_tokens=False)[1:3]
    detokenizer = IncrementalDetokenizer(llama, llama.encode("The"))
    assert detokenizer.push(half) == ""
    assert detokenizer.push(llama.encode("fox")[1:]) == "\ufffd\ufffd fox"


def test_space_between_prompt_and_completion(llama):
    """A first word loses its space; the first word of a completion does not."""
    fox = llama.encode("fox", add_special_tokens=False)
    assert IncrementalDetokenizer(llama).push(fox) == "fox"
    assert IncrementalDetokenizer(llama, llama.encode("")).push(fox) == "fox"
    assert IncrementalDetokenizer(llama, llama.encode("The quick")).push(fox) == " fox"


def test_special_tokens_at_the_end_of_the_prompt_are_no_text(llama):
    prompt = llama.encode("The quick") + [llama.eos_token_id] * 100
    fox = llama.encode("fox", add_special_tokens=False)
    assert IncrementalDetokenizer(llama, prompt).push(fox) == " fox"


def test_shown_special_token_is_text_before_the_completion(llama):
    fox = llama.encode("fox", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(llama, llama.encode(""), skip_special_tokens=False)
    assert detokenizer.push(fox) == " fox"


def test_character_that_begins_in_the_prompt(byte_level):
    first, *rest = byte_level.encode("བ", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_level, [*byte_level.encode("Hi "), first])
    assert detokenizer.push(rest) == "བ"


def test_an_empty_output_has_no_text_of_the_prompt(byte_level):
    half = byte_level.encode("世")[:-1]
    assert IncrementalDetokenizer(byte_level, half).push([], final=True) == ""


def test_only_the_end_of_a_long_prompt_is_decoded(byte_level):
    """The prompt's tail is enough, and special tokens at its end do not count as text."""
    prompt = byte_level.encode("The capital of France is Paris. " * 50)
    seen = []

    class Spy:
        def __getattr__(self, name):
            return getattr(byte_level, name)

        def text_stream(self, skip_special_tokens=True, shown_ids=()):
            stream = byte_level.text_stream(skip_special_tokens, shown_ids)
            push = stream.push
            stream.push = lambda ids: seen.append(len(ids)) or push(ids)
            return stream

    IncrementalDetokenizer(Spy(), prompt + [byte_level.eos_token_id] * 5)
    assert 5 < seen[0] < 80


def test_clean_up_over_tokens(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_word_piece(tmp_path))
    ids = tokenizer.encode("it's him , isn't it ?", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.push([], final=True)
    assert text == tokenizer.decode(ids)
    assert text.endswith(" it?")


def test_nothing_after_the_final_push(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    detokenizer.push([], final=True)
    with pytest.raises(AssertionError, match="final"):
        detokenizer.push([])


def test_stream_replacer_holds_only_what_may_match():
    replacer = StreamReplacer(" ' ", "'")
    assert [replacer.push(part, final=False) for part in ("a ", "b '", "", " c", " ")] == [
        "a",
        " b",
        "",
        "'c",
        "",
    ]
    assert replacer.push("'", final=True) == " '"


STRIP = {"type": "Strip", "content": " ", "start": 2, "stop": 0}
REPLACE = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
FUSE = {"type": "Fuse"}
BYTE_LEVEL = {"type": "ByteLevel"}


def decode(parts, tokens) -> str:
    decoding = parse_decoder({"type": "Sequence", "decoders": parts})
    vocabulary = Vocabulary(dict(enumerate(tokens)), (), decoding)
    stream = TextStream(vocabulary)
    return stream.push(range(len(tokens))) + stream.finish()


def test_strip_takes_no_more_than_its_number():
    assert decode([REPLACE, FUSE, STRIP], ["_", "__a", "_b"]) == " a b"
    assert decode([REPLACE, FUSE, STRIP], ["_a", "_b"]) == "a b"
    assert decode([BYTE_LEVEL, STRIP], ["\u0120", "a", "\u0120"]) == "a "


@pytest.mark.parametrize(
    "parts",
    [
        [STRIP],
        [REPLACE, STRIP],
        [FUSE, REPLACE],
        [BYTE_LEVEL, REPLACE],
        [{"type": "Replace", "pattern": {"Regex": "_"}, "content": " "}],
        [{}],
    ],
    ids=str,
)
def test_decoders_in_another_order_are_refused(parts):
    with pytest.raises(UnsupportedModelError, match=naming("ByteLevel")):
        decode(parts, [])


def test_what_follows_an_unknown_text_keeps_its_space(llama, byte_level):
    ids = llama.encode("The lazy dog", add_special_tokens=False)
    assert llama.decode(ids) == "The lazy dog"
    assert continuation(llama, ids) == " The lazy dog"
    ids = byte_level.encode("The lazy dog", add_special_tokens=False)
    assert continuation(byte_level, ids) == "The lazy dog"
    assert continuation(byte_level, []) == ""


def test_what_follows_an_unknown_text_may_show_special_tokens(llama):
    ids = [*llama.encode("dog", add_special_tokens=False), llama.eos_token_id]
    assert continuation(llama, ids).strip() == "dog"
    assert continuation(llama, ids, skip_special_tokens=False).strip() == "dog</s>"
