"""What an output must match, as a client says it. Compiled and matched by llguidance."""

import enum
from typing import Final

import msgspec

MAX_GRAMMAR_CHARACTERS: Final = 1 << 17
MAX_LEXER_FUEL: Final = 200_000
"""llguidance's initial_lexer_fuel, a fifth of its own: what building a grammar's lexer, and
following a text that it forces, may cost (about 0.1 s: the other rows of a step wait for it)."""


class GrammarLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one grammar may cost, in llguidance's units and under its names."""

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
    ANSWER = "answer"
    """A chat answer with reasoning or tool calls, see serving.text.answer_grammar."""
    LLGUIDANCE = "llguidance"
    """llguidance's own JSON form. All others become this one at admission."""


class Grammar(msgspec.Struct, frozen=True):
    kind: GrammarKind
    text: str
