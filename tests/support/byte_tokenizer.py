"""A tokenizer with one token for each byte and three special tokens, made without a file."""

import json
from typing import Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from loraplex.text.special_tokens import FolderTokens
from loraplex.text.token_decoding import BYTE_OF_CHAR
from loraplex.text.tokenizer import LibraryTokenizer

NUM_BYTES: Final = 256
BOS_TOKEN_ID: Final = 256
EOS_TOKEN_ID: Final = 257
PAD_TOKEN_ID: Final = 258
VOCAB_SIZE: Final = 259

BOS: Final = "<s>"
EOS: Final = "</s>"
PAD: Final = "<pad>"


def _byte_tokenizer() -> LibraryTokenizer:
    """Return the product's own tokenizer class; a byte's token id is the byte."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS, PAD)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_TOKEN_ID)]
    )
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    decoder = json.loads(backend.to_str())["decoder"]
    return LibraryTokenizer(backend, decoder, {}, FolderTokens(named, ()))


BYTE_TOKENIZER: Final = _byte_tokenizer()
