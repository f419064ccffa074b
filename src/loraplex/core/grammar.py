"""What an output must match, as a client says it. Compiled and matched by llguidance."""

import enum

import msgspec


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    """A JSON schema; `{"type": "object"}` is any object."""
    REGEX = "regex"
    LARK = "lark"
    EBNF = "ebnf"
    """GBNF, as xgrammar and llama.cpp write it."""
    CHOICE = "choice"
    """A JSON list of strings, one of which is the output."""
    LLGUIDANCE = "llguidance"
    """llguidance's own JSON form. All others become this one at admission."""


class Grammar(msgspec.Struct, frozen=True):
    kind: GrammarKind
    text: str
