"""The tokens that grammars see are the text that clients see, for every kind of tokenizer."""

import pytest

from loraplex.app.rank import vocabulary_of, vocabulary_source
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import GrammarLimits
from loraplex.execution.grammar.compiler import build_tokenizer
from loraplex.serving.text.detokenizer import IncrementalDetokenizer
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.naming import naming

TEXTS = (
    '{"name": "value", "list": [1, 2.5, true]}',
    "What is the capital of France?",
    " leading and  double spaces",
    "Größe 日本 \U0001f600",
    "\x02 control",
    "<s> is text here",
)
BYTES = ("byte-level", "byte-level-prefix-space", "llama3", "llama-sentencepiece")
"""These can write every text."""


@pytest.mark.parametrize("family", BYTES)
def test_a_forced_text_is_cut_into_tokens_that_spell_it(family, tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.FAMILIES[family](tmp_path))
    seen = build_tokenizer(vocabulary_of(tokenizer), tokenizer.vocab_size)

    for text in TEXTS:
        token_ids = seen.tokenize_str(text)
        assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
        assert not any(map(tokenizer.is_special, token_ids))
        assert len(token_ids) <= len(text.encode())


@pytest.mark.parametrize("family", BYTES)
def test_a_forced_text_has_the_tokens_that_the_model_knows_it_by(family, tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.FAMILIES[family](tmp_path))
    seen = build_tokenizer(vocabulary_of(tokenizer), tokenizer.vocab_size)
    start = tokenizer.encode("1", add_special_tokens=False)
    whole = tokenizer.encode("1 the capital of France", add_special_tokens=False)

    assert whole[: len(start)] == start
    assert seen.tokenize_str(" the capital of France") == whole[len(start) :]


@pytest.mark.parametrize("family", tiny_tokenizers.FAMILIES)
def test_tokens_are_what_they_add_to_a_text(family, tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.FAMILIES[family](tmp_path))
    vocabulary = vocabulary_of(tokenizer)
    prompt = tokenizer.encode("What is", add_special_tokens=True)

    for token_id, piece in enumerate(vocabulary.tokens):
        if token_id in vocabulary.special_ids or family == "word-piece":
            continue
        text = IncrementalDetokenizer(tokenizer, prompt).push((token_id,), final=True)
        assert text == piece.decode(errors="replace") or "\ufffd" in text


def test_special_tokens_are_no_text(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))
    vocabulary = vocabulary_of(tokenizer)

    names = {vocabulary.tokens[token_id] for token_id in vocabulary.special_ids}
    assert names == {b"<s>", b"</s>", b"<pad>", b"<|turn|>"}


def test_a_very_long_text_is_cut_into_its_first_tokens(tmp_path):
    """llguidance encodes at every token: a client's long constant must not cost its length each."""
    tokenizer = load_tokenizer(tiny_tokenizers.write_byte_level(tmp_path))
    seen = build_tokenizer(vocabulary_of(tokenizer), tokenizer.vocab_size)
    text = "What is the capital of France? " * 1000

    token_ids = seen.tokenize_str(text)

    assert len(token_ids) < 1024
    assert text.encode().startswith(b"".join(map(tokenizer.token_bytes, token_ids)))


def test_a_folder_is_read_when_it_is_needed(tmp_path):
    limits = GrammarLimits(step_max_items=7)
    model = ModelConfig(
        path="elsewhere",
        tokenizer=str(tmp_path),
        tokenizer_config={"extra_special_tokens": {"image_token": "<extra>"}},
        grammar_limits=limits,
    )
    source = vocabulary_source(model)

    with pytest.raises(ConfigError, match=naming("tokenizer.model")):
        source()
    tiny_tokenizers.write_byte_level(tmp_path)
    vocabulary = source()
    assert vocabulary.tokens[-1] == b"<extra>"
    assert len(vocabulary.tokens) - 1 in vocabulary.special_ids
    assert vocabulary.limits == limits
