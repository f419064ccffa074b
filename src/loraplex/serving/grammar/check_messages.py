"""What the process that checks grammars is told, and what it answers."""

import struct
from typing import Final

import msgspec

from loraplex.core.errors import ErrorInfo
from loraplex.core.grammar import GrammarLimits

LENGTH: Final = struct.Struct("<I")
"""Of each message, before its msgpack."""
MAX_SECONDS: Final = 0.5
"""Of processor time for one grammar. The engine compiles what passed once more, and its rows with
grammars wait for that."""


class CheckSetup(msgspec.Struct, frozen=True):
    """Of the model whose grammars these are; the first message, without an answer."""

    special_tokens: dict[int, bytes]
    vocab_size: int
    limits: GrammarLimits


class CheckReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`compiled`, or why not."""

    compiled: str = ""
    error: ErrorInfo | None = None
    is_last: bool = False
    """The process ends: the next grammar needs a new one."""
