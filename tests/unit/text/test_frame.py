"""BOS and EOS by the rules of the folder, as in transformers; and by an operator's entries."""

import asyncio
import itertools
import json

import msgspec
import pytest
from transformers import AutoTokenizer

from loraplex.core.errors import PromptTooLongError
from loraplex.serving.backend import EncoderFormat
from loraplex.serving.local_texts import ChatRenderer, LocalTexts
from loraplex.text.tokenizer import load_tokenizer
from support.byte_tokenizer import BYTE_TOKENIZER
from support.echo_service import echo_card
from support.tiny_tokenizer_pipelines import PIPELINES, with_config, write_gemma
from support.tiny_tokenizers import BOS, EOS, FAMILIES, write_llama_sentencepiece

JSON_FAMILIES = {**PIPELINES, **{k: v for k, v in FAMILIES.items() if "sentencepiece" not in k}}
FLAGS = [
    {key: value for key, value in flags.items() if value is not None}
    for flags in (
        {"add_bos_token": bos, "add_eos_token": eos}
        for bos, eos in itertools.product((None, True, False), repeat=2)
    )
]
TEXTS = ("", "Hello world", "<s>Hello", " <s> Hello</s>", "<|end|>  x<tool_call> y")


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_equals_transformers_for_all_flags(family, tmp_path):
    """They do not count if there is a tokenizer.json."""
    for index, flags in enumerate([*FLAGS, {"bos_token": None}, {"eos_token": None}]):
        folder = with_config(JSON_FAMILIES[family](tmp_path / str(index)), **flags)
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert ours.encode(text) == theirs.encode(text), (flags, text)
        assert ours.bos_token_id == theirs.bos_token_id
        assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_flags_count_beside_a_sentencepiece_model(flags, tmp_path):
    folder = write_llama_sentencepiece(tmp_path, flags)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Hello")
    assert (ids[0] == tokenizer.bos_token_id) == flags.get("add_bos_token", True)
    assert (ids[-1] == tokenizer.eos_token_id) == flags.get("add_eos_token", False)


@pytest.mark.parametrize("family", [*JSON_FAMILIES, "llama-sentencepiece"])
def test_a_templates_bos_is_the_only_one(family, tmp_path):
    """It holds with and without add_special_tokens; one that the client wrote counts, too."""
    tokenizer = load_tokenizer({**JSON_FAMILIES, **FAMILIES}[family](tmp_path))
    texts = LocalTexts(echo_card("m"), tokenizer, ChatRenderer({}))

    def tokenize(text: str, add_special_tokens: bool) -> list[int]:
        return texts.tokenize(text, add_special_tokens=add_special_tokens)

    bos = tokenizer.special_tokens.get("bos_token")
    if bos is None:
        assert tokenize("Hello", True) == tokenizer.encode("Hello", False)
        return
    with_bos = tokenizer.encode(bos + "Hello", False)
    assert with_bos.count(tokenizer.bos_token_id) == 1
    assert tokenize(bos + "Hello", True) == with_bos
    assert tokenize(bos + "Hello", False) == with_bos
    assert tokenize("Hello", False).count(tokenizer.bos_token_id) == 0
    added = tokenize("Hello", True)
    assert added[0] == tokenizer.bos_token_id
    assert added.count(tokenizer.bos_token_id) == 1


def test_the_length_of_outputs_does_not_limit_an_encoders_input():
    card = msgspec.structs.replace(
        echo_card("m"), max_model_len=4, encoder=EncoderFormat(max_tokens=100, first_ids=(2,))
    )
    texts = LocalTexts(card, BYTE_TOKENIZER, ChatRenderer({}))
    assert len(asyncio.run(texts.prompt_ids("a" * 60, False))) == 60
    with pytest.raises(PromptTooLongError, match=r"takes at most 100 tokens$"):
        asyncio.run(texts.prompt_ids("a" * 30_000, False))


@pytest.mark.parametrize(
    ("overrides", "before", "after"),
    [
        ({}, [BOS], []),
        ({"bos_token": None}, [], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [BOS], [EOS]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [EOS]),
        ({"add_eos_token": True, "eos_token": None}, [BOS], []),
        ({"bos_token": "<start_of_turn>", "add_bos_token": True}, ["<start_of_turn>"], []),
        ({"bos_token": "<start_of_turn>"}, [BOS], []),
    ],
    ids=str,
)
def test_operators_entries(overrides, before, after, tmp_path):
    tokenizer = load_tokenizer(write_gemma(tmp_path), overrides)
    ids = tokenizer.encode("Hello")
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    start = len(before)
    assert [tokenizer.token_text(i) for i in ids[:start]] == before
    assert ids[start : start + len(bare)] == bare
    assert [tokenizer.token_text(i) for i in ids[start + len(bare) :]] == after


def test_an_operator_denies_the_bos_of_a_sentencepiece_model(tmp_path):
    tokenizer = load_tokenizer(write_llama_sentencepiece(tmp_path), {"bos_token": None})
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)


def test_operators_entries_come_before_the_older_files(tmp_path):
    folder = write_gemma(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": BOS}))
    assert load_tokenizer(folder).bos_token_id is not None
    assert load_tokenizer(folder, {"bos_token": None}).bos_token_id is None


def test_both_ends_are_kept_where_only_one_is_overridden(tmp_path):
    folder = write_gemma(tmp_path)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    piece = {"SpecialToken": {"id": EOS, "type_id": 0}}
    data["post_processor"]["single"].append(piece)
    data["post_processor"]["special_tokens"][EOS] = {"id": EOS, "ids": [2], "tokens": [EOS]}
    path.write_text(json.dumps(data))
    tokenizer = load_tokenizer(folder, {"bos_token": None})
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*bare, tokenizer.eos_token_id]
    assert tokenizer.encode("") == [tokenizer.eos_token_id]


def test_flags_of_a_token_come_from_the_config_or_the_file(tmp_path):
    """A role that is only a name does not take `rstrip` from the token of that name."""
    folder = PIPELINES["phi3"](tmp_path)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a<|end|>  b", "<|user|>\nHi<|end|>\n<|assistant|>\n"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode("a<|end|>  b"), False) == "<s> a<|end|> b"
