"""A tokenizer without a file: one token per byte, three special tokens. EchoBackend's own."""

import re
from collections.abc import Sequence

NUM_BYTES = 256
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
PAD_TOKEN_ID = 258
VOCAB_SIZE = 259

SPECIAL_TOKENS = {"<s>": BOS_TOKEN_ID, "</s>": EOS_TOKEN_ID, "<pad>": PAD_TOKEN_ID}
_TOKEN_BYTES = (
    *(bytes([byte]) for byte in range(NUM_BYTES)),
    *(text.encode() for text in SPECIAL_TOKENS),
)
"""Bytes by token id."""
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")


def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The UTF-8 bytes of text; a special token that is written out becomes its id.

    `<s>` is put in front if add_special_tokens.
    """
    token_ids = [BOS_TOKEN_ID] if add_special_tokens else []
    for part in _SPECIAL_PATTERN.split(text):
        special = SPECIAL_TOKENS.get(part)
        token_ids.extend(part.encode() if special is None else (special,))
    return token_ids


def token_bytes(token_id: int) -> bytes:
    """The byte, or the text of a special token."""
    return _TOKEN_BYTES[token_id]


def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text; bytes that are no UTF-8 become U+FFFD."""
    limit = NUM_BYTES if skip_special_tokens else VOCAB_SIZE
    return b"".join([_TOKEN_BYTES[t] for t in token_ids if t < limit]).decode(errors="replace")
