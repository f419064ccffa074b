"""The tokenizer of the fixtures: a generated text determines its token ids.

In the form of Llama 2's tokenizer.json (BPE with byte fallback), which every server reads. The
tokens are 3 special ones, 256 bytes, the space mark, 26 letters, 676 pairs of them, and as many
words of two pairs as fit. Only those words are ever generated (the fixture's model
gives all others the logit 0), so a text of them determines its tokens: four letters each.
"""

import itertools
import json
import string
from pathlib import Path
from typing import Any

BOS_ID, EOS_ID = 1, 2
_SPECIAL = ("<unk>", "<s>", "</s>")
NUM_SPECIAL = len(_SPECIAL)
NUM_BYTE_TOKENS = 256
"""Tokens of single bytes, after the special ones."""
_SPACE = "\u2581"
_PAIRS = tuple(a + b for a, b in itertools.product(string.ascii_lowercase, repeat=2))
FIRST_WORD_ID = NUM_SPECIAL + NUM_BYTE_TOKENS + 1 + 26 + len(_PAIRS)
"""Ids from here on are four-letter words."""


def token_texts(vocab_size: int) -> tuple[str, ...]:
    """The tokens by id. vocab_size: from FIRST_WORD_ID to that + 676 * 676."""
    words = (a + b for a, b in itertools.product(_PAIRS, repeat=2))
    return (
        *_SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(NUM_BYTE_TOKENS)),
        _SPACE,
        *string.ascii_lowercase,
        *_PAIRS,
        *itertools.islice(words, vocab_size - FIRST_WORD_ID),
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    unknown, bos, eos = _SPECIAL
    named = {"unk_token": unknown, "bos_token": bos, "eos_token": eos}
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    _write(folder / "tokenizer.json", _tokenizer(token_texts(vocab_size)))
    _write(folder / "tokenizer_config.json", named | options)
    _write(folder / "special_tokens_map.json", named)


def _tokenizer(texts: tuple[str, ...]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, content in enumerate(_SPECIAL)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": _SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _SPECIAL[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: token_id for token_id, text in enumerate(texts)},
            "merges": [
                [text[: len(text) // 2], text[len(text) // 2 :]]
                for text in texts[FIRST_WORD_ID - len(_PAIRS) :]
            ],
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
