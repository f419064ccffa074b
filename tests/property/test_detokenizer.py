"""Incremental decoding equals whole decoding, for every tokenizer family and any split."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer

from loraplex.serving.text.detokenizer import IncrementalDetokenizer
from loraplex.testing.tiny_tokenizers import FAMILIES
from loraplex.text.sentencepiece_model import build_tokenizer, read_sentencepiece_model
from loraplex.text.tokenizer import load_tokenizer

LOSSLESS = ("byte-level", "llama3", "llama-sentencepiece")
CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

TEXT_PARTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["Hello", " ", "  ", "\n", "世界", "👨‍👩‍👧", "e\u0301", "བོད", " don't", " .", "</s>"]
    ),
)
TEXTS = st.lists(TEXT_PARTS, max_size=12).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def backends(folders):
    """The `tokenizers` library alone."""
    loaded = {}
    for name, folder in folders.items():
        if (folder / "tokenizer.json").exists():
            loaded[name] = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            model = read_sentencepiece_model(folder / "tokenizer.model")
            loaded[name] = build_tokenizer(model, {"legacy": False})
    return loaded


def draw_ids(data, tokenizer) -> list[int]:
    """Any ids, or those of a text; a text's tokens cut apart make invalid UTF-8."""
    kind = data.draw(st.sampled_from(["ids", "text", "cut"]))
    if kind == "ids":
        # A few ids often, lest runs of byte tokens or of punctuation are too rare.
        few = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), min_size=1, max_size=6))
        return data.draw(st.lists(st.sampled_from(few), max_size=40))
    ids = tokenizer.encode(data.draw(TEXTS))
    if kind == "cut":
        kept = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        ids = [i for i, is_kept in zip(ids, kept, strict=True) if is_kept]
    return ids


def draw_split(data, ids) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    bounds = [0, *cuts, len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def stream(detokenizer, parts) -> str:
    """Final with the last part, or with an empty one after it."""
    text = "".join(detokenizer.push(part) for part in parts[:-1])
    return text + detokenizer.push(parts[-1], final=True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_whole_decode(family, tokenizers, data):
    tokenizer = tokenizers[family]
    ids = draw_ids(data, tokenizer)
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert stream(detokenizer, draw_split(data, ids)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_output_is_the_generated_part_of_the_whole_decode(family, tokenizers, data):
    tokenizer = tokenizers[family]
    prompt, output = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    if data.draw(st.booleans()):
        prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3) + prompt
    skip = data.draw(st.booleans())
    settled = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip).push(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = stream(detokenizer, draw_split(data, output))
    assert settled + text == tokenizer.decode(prompt + output, skip)


@pytest.mark.parametrize("family", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_encoded_text_comes_back(family, tokenizers, data):
    tokenizer = tokenizers[family]
    text = data.draw(TEXTS)
    if family == "llama-sentencepiece":
        text = text.replace("▁", "").lstrip(" ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert stream(detokenizer, draw_split(data, ids)) == text


@pytest.mark.parametrize("family", LOSSLESS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_every_character_is_given_as_soon_as_it_is_complete(family, tokenizers, text):
    tokenizer = tokenizers[family]
    ids = tokenizer.encode("x" + text.replace("▁", ""), add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    shown, data = "", b""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        data += tokenizer.token_bytes(token_id)
        complete = data.decode(errors="ignore")
        assert shown == (complete.removeprefix(" ") if family in LOSSLESS[2:] else complete)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whole_decode_equals_the_library(family, tokenizers, backends, data):
    """For any ids; but of byte tokens the library spoils whole runs when one is bad."""
    tokenizer = tokenizers[family]
    ids = draw_ids(data, tokenizer)
    skip = data.draw(st.booleans())
    expected = backends[family].decode(ids, skip_special_tokens=skip)
    if family == "word-piece":
        for old in CLEAN_UP:
            expected = expected.replace(old, old.strip(" "))
    text = tokenizer.decode(ids, skip)
    if "sentencepiece" in family and "\ufffd" in expected:
        assert text.count("\ufffd") <= expected.count("\ufffd")
        assert len(text.encode()) <= len(expected.encode())
    else:
        assert text == expected
