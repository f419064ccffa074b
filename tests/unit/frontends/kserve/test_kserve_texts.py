"""ModelTexts over a tokenizer that puts a space before every text."""

import pytest

from loraplex.frontends.kserve.models.triton_model import ModelTexts
from loraplex.text.tokenizer import load_tokenizer
from support import tiny_tokenizers
from support.echo_service import EchoService

COMPLETION = "The lazy dog"


def texts_of(tokenizer):
    """The texts of a model with a tokenizer."""
    backend = EchoService()
    backend.model("echo").tokenizer = tokenizer
    return ModelTexts(backend, "echo")


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(tiny_tokenizers.write_llama_sentencepiece(tmp_path))


@pytest.fixture
def texts(tokenizer):
    return texts_of(tokenizer)


def test_prompt_and_completion_add_up(texts):
    prompt = texts.encode("A quick fox", add_special_tokens=True)
    completion = texts.encode(COMPLETION)
    assert texts.decode(prompt) == "A quick fox"
    assert texts.decode(prompt + completion) == texts.decode(prompt) + texts.decode(completion)
    assert texts.decode(completion) == f" {COMPLETION}"


def test_a_text_without_special_tokens_of_a_model_that_adds_none(tmp_path):
    folder = tiny_tokenizers.write_llama_sentencepiece(tmp_path, {"add_bos_token": False})
    texts = texts_of(load_tokenizer(folder))
    assert texts.decode(texts.encode(COMPLETION)) == COMPLETION


def test_a_token_that_is_half_a_character(texts, tokenizer):
    half = tokenizer.encode("བ", add_special_tokens=False)[1]
    assert texts.token_texts()(half) == "\ufffd"
