"""ModelTexts over a tokenizer that puts a space before every text."""

import pytest

from loraplex.frontends.kserve.models.texts import ModelTexts
from loraplex.serving.text.detokenizer import continuation
from loraplex.testing.echo_backend import EchoBackend
from loraplex.testing.echo_model import EchoModel, echo_card
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers

COMPLETION = "The lazy dog"


class TokenizerModel(EchoModel):
    """Reads and writes text as the tokenizer of one folder does."""

    def __init__(self, tokenizer, state):
        super().__init__(echo_card("echo"), state)
        self._tokenizer = tokenizer

    def tokenize(self, text, *, add_special_tokens=True):
        return self._tokenizer.encode(text, add_special_tokens)

    def detokenize(self, token_ids, *, skip_special_tokens=True, is_continuation=False):
        if is_continuation:
            skips = skip_special_tokens
            return continuation(self._tokenizer, token_ids, skip_special_tokens=skips)
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id):
        return self._tokenizer.token_bytes(token_id)


class TokenizerBackend(EchoBackend):
    def __init__(self, tokenizer):
        super().__init__()
        self._models = {"echo": TokenizerModel(tokenizer, self)}


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(tiny_tokenizers.write_llama_sentencepiece(tmp_path))


@pytest.fixture
def texts(tokenizer):
    return ModelTexts(TokenizerBackend(tokenizer), "echo")


def test_prompt_and_completion_add_up(texts):
    prompt = texts.encode("A quick fox", add_special_tokens=True)
    completion = texts.encode(COMPLETION)
    assert texts.decode(prompt) == "A quick fox"
    assert texts.decode(prompt + completion) == texts.decode(prompt) + texts.decode(completion)
    assert texts.decode(completion) == f" {COMPLETION}"


def test_a_text_without_special_tokens_of_a_model_that_adds_none(tmp_path):
    folder = tiny_tokenizers.write_llama_sentencepiece(tmp_path, {"add_bos_token": False})
    texts = ModelTexts(TokenizerBackend(load_tokenizer(folder)), "echo")
    assert texts.decode(texts.encode(COMPLETION)) == COMPLETION


def test_a_token_that_is_half_a_character(texts, tokenizer):
    half = tokenizer.encode("བ", add_special_tokens=False)[1]
    assert texts.token_text(half) == "\ufffd"
