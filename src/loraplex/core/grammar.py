"""Constraints of an output, as clients send them. llguidance compiles and matches them."""

import enum
from typing import Final

import msgspec

MAX_GRAMMAR_CHARACTERS: Final = 1 << 17
MAX_LEXER_FUEL: Final = 200_000
"""Value of llguidance's initial_lexer_fuel, a fifth of its default: the limit of the cost of
building a grammar's lexer and of following a forced text (about 0.1 s, for which the other rows of
a step wait)."""


class GrammarLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the cost of one grammar, in llguidance's units and with its names."""

    max_items_in_row: int = 2_000
    initial_lexer_fuel: int = MAX_LEXER_FUEL
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 250_000
    max_grammar_size: int = 500_000


DEFAULT_LIMITS: Final = GrammarLimits()


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    """A JSON schema; `{"type": "object"}` is any object."""
    REGEX = "regex"
    LARK = "lark"
    EBNF = "ebnf"
    """GBNF, as xgrammar and llama.cpp write it."""
    CHOICE = "choice"
    """A JSON list of strings, one of which is the output."""
    MESSAGE = "message"
    """A chat message with reasoning or tool calls, see serving.text.chat_format."""
    LLGUIDANCE = "llguidance"
    """llguidance's own JSON form. All others are converted to it at admission."""


class Grammar(msgspec.Struct, frozen=True):
    kind: GrammarKind
    text: str
