"""Marian's files, as published: ids are those of transformers' MarianTokenizer."""

import json
import os
from pathlib import Path

import pytest
import sentencepiece
from transformers import MarianTokenizer

from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import Tokenizer, load_tokenizer
from support.naming import naming
from support.tiny_tokenizers import write_unigram_sentencepiece

# The first test makes the fixture, whichever it is.
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "The capital of France is Paris.",
    "  Größe   naïve façade ",
    "法国的首都是巴黎。 日本 Россия",
    "ＦＵＬＬ ｗｉｄｔｈ ﬁ ①",
    "\u0000 a\u200bb\u00a0c",
    "fox\0▁Das \0>>fra<<",
    "👍🏽 quick 👨‍👩‍👧‍👦 fox",
    "a </s> b",
    "<unk><pad> fox",
    ">>deu<< The quick brown fox",
    ">>deu<<The quick",
    ">>xyz<< The quick",
    ">> no code",
    "in the middle of >> a << text",
    "fox " * 400,
)


def write_marian(folder: Path, *, every: int = 7) -> Path:
    """Write the files of a checkpoint; each `every`-th piece of the source has no id."""
    write_unigram_sentencepiece(folder)
    os.replace(folder / "tokenizer.model", folder / "source.spm")
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    source = sentencepiece.SentencePieceProcessor(str(folder / "source.spm"))
    pieces = [source.id_to_piece(index) for index in range(3, source.vocab_size())]
    kept = [piece for index, piece in enumerate(pieces) if index % every]
    # Pieces of the target's, one of which is a word of the source's texts.
    others = ["▁Hauptstadt", "▁Das", "▁quick▁brown", "zig"]
    tokens = ["</s>", "<unk>", *kept, *others, ">>deu<<", ">>fra<<", "<pad>"]
    ids = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    (folder / "vocab.json").write_text(json.dumps(ids))
    languages = {"source_lang": "eng", "target_lang": "deu"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> MarianTokenizer:
    return MarianTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers(
    ours: Tokenizer, theirs: MarianTokenizer, text: str
) -> None:
    for adds_special_tokens in (True, False):
        expected = theirs.encode(text, add_special_tokens=adds_special_tokens)
        assert ours.encode(text, adds_special_tokens) == expected


def test_the_texts_have_pieces_without_an_id(ours: Tokenizer, folder: Path) -> None:
    """Otherwise equal ids would prove little."""
    source = sentencepiece.SentencePieceProcessor(str(folder / "source.spm"))
    ids = json.loads((folder / "vocab.json").read_text())
    pieces = source.encode("The capital of France is Paris.", out_type=str)
    assert any(piece not in ids for piece in pieces)
    assert ids["<unk>"] in ours.encode("The capital of France is Paris.")


def test_outputs_are_decoded_by_the_common_vocabulary(
    ours: Tokenizer, theirs: MarianTokenizer
) -> None:
    ids = theirs.convert_tokens_to_ids(["▁Das", "▁Hauptstadt", "zig", "</s>", "<pad>"])
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "Das Hauptstadtzig"
    assert ours.token_bytes(ids[1]) == b" Hauptstadt"


def test_roles_and_sizes(ours: Tokenizer, theirs: MarianTokenizer) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.eos_token_id == theirs.eos_token_id == 0
    assert ours.pad_token_id == theirs.pad_token_id == ours.vocab_size - 1
    assert ours.bos_token_id is None
    special = {index for index in range(ours.vocab_size) if ours.is_special(index)}
    assert special == {0, 1, ours.vocab_size - 1}


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ({"</s>": 0, "<unk>": 2}, (2,)),
        ({"</s>": 0, "<unk>": 0}, (2,)),
        ({"</s>": 0, "<unk>": "1"}, (2,)),
        ({"</s>": 0}, ("<unk>",)),
        ({"<unk>": 0}, ("</s>",)),
    ],
    ids=str,
)
def test_a_vocabulary_that_is_refused(tmp_path: Path, ids: object, named: tuple[object]) -> None:
    write_marian(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(ConfigError, match=naming("vocab.json", *named)):
        load_tokenizer(tmp_path)


def test_a_folder_without_its_vocabulary(tmp_path: Path) -> None:
    write_marian(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(ConfigError, match=naming("vocab.json", "</s>")):
        load_tokenizer(tmp_path)
