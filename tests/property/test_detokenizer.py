"""Incremental decoding equals whole decoding, for every tokenizer family and any split.

The families are 16: their own pipelines, trained small.
"""

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from loraplex.serving.text.detokenizer import IncrementalDetokenizer, continuation
from loraplex.text.sentencepiece_model import build_tokenizer, read_sentencepiece_model
from loraplex.text.special_tokens import read_json_object
from loraplex.text.token_decoding import MAX_RUN_BYTES
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.examples import examples
from support.tiny_tokenizer_pipelines import BYTE_FALLBACK, PIPELINES

FAMILIES = {**tiny_tokenizers.FAMILIES, **PIPELINES}
SPACE_BEFORE_TEXT = ("llama-sentencepiece", "llama2-metaspace")
LOSSLESS = (
    *("byte-level", "llama3", "falcon", "gemma", "mistral-tekken"),
    *SPACE_BEFORE_TEXT,
)
HAS_BYTE_TOKENS = {"llama-sentencepiece", *BYTE_FALLBACK}

TEXT_PARTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            *(
                "Hello",
                " ",
                "  ",
                "     ",
                "\n",
                "\n\n",
                "\t\t",
                "世界",
                "👨‍👩‍👧",
                "🏳️‍🌈",
                "🇫🇷",
                "e\u0301",
            ),
            *(
                "བོད",
                "שלום",
                "مرحبا",
                "\u202e",
                "\ufeff",
                "\ufffd",
                "\U0010ffff",
                "▁",
                " don't",
                " .",
            ),
            *(
                "</s>",
                "<s>",
                "<|end|>",
                "<|im_end|>",
                "<tool_call>",
                "[INST]",
                "<｜User｜>",
                "12345",
            ),
            *("<0xE4>", "Ġ", "##s", " ' ", " n't"),
        ]
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


@pytest.fixture(scope="module")
def references(folders, backends):
    """transformers', on the same files."""
    made = {}
    for name, folder in folders.items():
        config = read_json_object(folder / "tokenizer_config.json")
        made[name] = PreTrainedTokenizerFast(
            tokenizer_object=backends[name],
            clean_up_tokenization_spaces=config.get("clean_up_tokenization_spaces", False),
        )
    return made


def byte_ids(reference) -> set[int]:
    return {i for token, i in reference.get_vocab().items() if re.fullmatch("<0x..>", token)}


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


# ------------------------------------------------------------------ any split is the whole


def check_split(tokenizer, data) -> None:
    ids = draw_ids(data, tokenizer)
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert stream(detokenizer, draw_split(data, ids)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@examples(0.6)
@given(data=st.data())
def test_any_split_gives_the_whole_decode(family, tokenizers, data):
    check_split(tokenizers[family], data)


def check_output(tokenizer, reference, data) -> None:
    prompt, output = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    if bytes_alone := byte_ids(reference):
        # A run of byte tokens that the prompt begins would begin anew with the output.
        while prompt and (
            prompt[-1] in bytes_alone
            or tokenizer.is_special(prompt[-1])
            or not tokenizer.token_bytes(prompt[-1])
        ):
            prompt = prompt[:-1]
    if data.draw(st.booleans()):
        prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3) + prompt
    skip = data.draw(st.booleans())
    settled = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip).push(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = stream(detokenizer, draw_split(data, output))
    if output:
        assert settled + text == tokenizer.decode(prompt + output, skip)
    else:
        assert text == "", "what the prompt holds back is not the output's"


@pytest.mark.parametrize("family", FAMILIES)
@examples(0.6)
@given(data=st.data())
def test_output_is_the_generated_part_of_the_whole_decode(family, tokenizers, references, data):
    check_output(tokenizers[family], references[family], data)


# ------------------------------------------------------------------ the whole is transformers'


def check_whole(tokenizer, reference, data) -> None:
    ids = draw_ids(data, tokenizer)
    skip = data.draw(st.booleans())
    expected = reference.decode(
        [i for i in ids if i < tokenizer.vocab_size], skip_special_tokens=skip
    )
    assert tokenizer.decode(ids, skip) == expected


@pytest.mark.parametrize("family", FAMILIES)
@examples(0.6)
@given(data=st.data())
def test_whole_decode_equals_transformers(family, tokenizers, references, data):
    check_whole(tokenizers[family], references[family], data)


# ------------------------------------------------------------------ nothing is lost, nothing waits


@pytest.mark.parametrize("family", LOSSLESS)
@examples(0.6)
@given(data=st.data())
def test_encoded_text_comes_back(family, tokenizers, data):
    tokenizer = tokenizers[family]
    text = data.draw(TEXTS)
    if family in SPACE_BEFORE_TEXT or family == "gemma":
        text = text.replace("▁", "")
    if family in SPACE_BEFORE_TEXT:
        text = text.lstrip(" ")
        assume(not text.startswith(("<s>", "</s>", "<|")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert stream(detokenizer, draw_split(data, ids)) == text


@pytest.mark.parametrize("family", LOSSLESS)
@examples(0.6)
@given(text=TEXTS)
def test_every_character_is_given_as_soon_as_it_is_complete(family, tokenizers, references, text):
    tokenizer, bytes_alone = tokenizers[family], byte_ids(references[family])
    ids = tokenizer.encode("x" + text.replace("▁", ""), add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    shown, data, run = "", b"", 0
    for token_id in ids:
        shown += detokenizer.push([token_id])
        data += tokenizer.token_bytes(token_id)
        run = run + 1 if token_id in bytes_alone else 0
        # A run of byte tokens is complete when it ends, or when it is too long to be held back.
        whole, ended = (
            part.decode(errors="ignore").removeprefix(" " * (family in SPACE_BEFORE_TEXT))
            for part in (data, data[: len(data) - run])
        )
        assert whole.startswith(shown)
        assert shown.startswith(ended)
        assert len(shown.encode()) >= len(whole.encode()) - MAX_RUN_BYTES
        if run <= MAX_RUN_BYTES:
            assert shown == ended


@pytest.mark.parametrize("family", LOSSLESS)
@examples(0.6)
@given(before=TEXTS, after=TEXTS)
def test_a_completion_goes_on_where_the_prompt_ended(family, tokenizers, before, after):
    """No space between them is lost or made; two texts are one."""
    tokenizer = tokenizers[family]
    before, after = before.replace("▁", ""), after.replace("▁", "")
    whole = tokenizer.encode("x" + before + after, add_special_tokens=False)
    for cut in range(1, len(whole) + 1):
        prompt, output = whole[:cut], whole[cut:]
        settled = b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="ignore")
        settled = settled.removeprefix(" " * (family in SPACE_BEFORE_TEXT))
        completion = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=False)
        assert settled + completion.push(output, final=True) == "x" + before + after


@pytest.mark.some(6)
@pytest.mark.parametrize("family", FAMILIES)
@examples(0.6)
@given(data=st.data())
def test_continuation_is_what_follows_a_text(family, tokenizers, data):
    tokenizer = tokenizers[family]
    ids = draw_ids(data, tokenizer)
    before = tokenizer.encode("a", add_special_tokens=False)
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(before + ids, skip)
    text = continuation(tokenizer, ids, skip_special_tokens=skip)
    assert whole.endswith(text)
    assert whole.removesuffix(text) == tokenizer.decode(before, skip)


# ------------------------------------------------------------------ runs of byte tokens


@pytest.mark.parametrize("family", sorted(HAS_BYTE_TOKENS))
@examples(2)
@given(data=st.data())
def test_runs_of_bytes_are_those_of_transformers(family, tokenizers, references, data):
    """Valid characters, cut and broken ones, between other tokens; in any pieces."""
    tokenizer = tokenizers[family]
    ids_of = {tokenizer.token_bytes(i)[0]: i for i in byte_ids(references[family])}
    others = st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i])
    runs = st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=3)).map(
        lambda run: [ids_of[byte] for byte in run]
    )
    parts = data.draw(st.lists(st.one_of(runs, runs, others), max_size=5))
    ids = [i for part in parts for i in part]
    skip = data.draw(st.booleans())
    expected = references[family].decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert stream(detokenizer, draw_split(data, ids)) == expected


@pytest.mark.parametrize("family", sorted(HAS_BYTE_TOKENS))
def test_a_long_run_is_not_held_back_whole(family, tokenizers, references):
    tokenizer = tokenizers[family]
    ids_of = {tokenizer.token_bytes(i)[0]: i for i in byte_ids(references[family])}
    text = "\u0f56\u0f7c\u0f51" * 40
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for number, byte in enumerate(text.encode(), start=1):
        shown += detokenizer.push([ids_of[byte]])
        assert text.startswith(shown)
        assert len(shown.encode()) >= number - MAX_RUN_BYTES - 3
    assert shown + detokenizer.push([], final=True) == text


@pytest.mark.parametrize("family", sorted(HAS_BYTE_TOKENS))
@pytest.mark.parametrize("num_of_prompt", range(7))
def test_a_run_begins_anew_with_the_output(family, num_of_prompt, tokenizers, references):
    """The prompt's whole characters are its own; one that the prompt begins is the output's."""
    tokenizer = tokenizers[family]
    ids_of = {tokenizer.token_bytes(i)[0]: i for i in byte_ids(references[family])}
    ids = [ids_of[byte] for byte in "\u0f56\u0f7c".encode()]
    before = tokenizer.encode("a", add_special_tokens=False) + ids[:num_of_prompt]
    text = IncrementalDetokenizer(tokenizer, before).push(ids[num_of_prompt:], final=True)
    assert text == ("\u0f56\u0f7c", "\u0f7c", "")[num_of_prompt // 3]
