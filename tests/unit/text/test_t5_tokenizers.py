"""T5's spiece.model and ByT5's bytes, as published: ids are those of transformers."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google.protobuf.runtime_version
import pytest
from transformers import ByT5Tokenizer

from loraplex.core.errors import ConfigError
from loraplex.text.tokenizer import Tokenizer, load_tokenizer
from support.naming import naming
from support.tiny_tokenizers import train_t5_pieces

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "The capital of France is Paris.",
    "  Größe   naïve façade ",
    "法国的首都是巴黎。 日本 Россия",
    "ＦＵＬＬ ｗｉｄｔｈ ﬁ ①",
    "👍🏽 quick 👨‍👩‍👧‍👦 fox",
    "a</s>b",
    "The <extra_id_0> of <extra_id_2> is",
    "fox " * 400,
)
ROLES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({**ROLES, **config}))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Return transformers' AutoTokenizer, which demands a newer protobuf than it needs."""
    monkeypatch.setattr(
        google.protobuf.runtime_version, "ValidateProtobufRuntimeVersion", lambda *a: None
    )
    from transformers import AutoTokenizer

    load: Callable[[Path], Any] = AutoTokenizer.from_pretrained
    return load


def assert_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for adds_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=adds_special_tokens)
            assert ours.encode(text, adds_special_tokens) == ids, repr(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)


@pytest.mark.parametrize("extra_ids", [0, 3])
def test_sentencepiece_of_t5(
    tmp_path: Path, reference: Callable[[Path], Any], extra_ids: int
) -> None:
    train_t5_pieces(tmp_path)
    os.replace(tmp_path / "tokenizer.model", tmp_path / "spiece.model")
    write_config(tmp_path, tokenizer_class="T5Tokenizer", extra_ids=extra_ids)
    ours, theirs = load_tokenizer(tmp_path), reference(tmp_path)
    assert_equal(ours, theirs)
    assert (ours.pad_token_id, ours.eos_token_id, ours.bos_token_id) == (0, 1, None)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("extra_ids", [0, 125])
def test_bytes(tmp_path: Path, extra_ids: int) -> None:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
    roles = {
        role: {"content": text, "__type": "AddedToken", **plain} for role, text in ROLES.items()
    }
    write_config(tmp_path, **roles, tokenizer_class="ByT5Tokenizer", extra_ids=extra_ids)
    ours = load_tokenizer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ByT5Tokenizer.from_pretrained(tmp_path)
        assert_equal(ours, theirs)
    assert ours.encode("é") == [3 + 0xC3, 3 + 0xA9, 1]
    assert ours.token_bytes(3 + 0xC3) == b"\xc3"
    assert (ours.pad_token_id, ours.eos_token_id, ours.bos_token_id) == (0, 1, None)
    assert ours.vocab_size == 3 + 256 + extra_ids


@pytest.mark.parametrize("count", [-1, 1001, "3", None])
def test_numbers_of_gaps_that_are_refused(tmp_path: Path, count: object) -> None:
    write_config(tmp_path, tokenizer_class="ByT5Tokenizer", extra_ids=count)
    with pytest.raises(ConfigError, match=naming("extra_ids", 1000, repr(count))):
        load_tokenizer(tmp_path)


def test_other_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").touch()
    with pytest.raises(ConfigError, match=naming(tmp_path.name, "tokenizer.json")):
        load_tokenizer(tmp_path)
