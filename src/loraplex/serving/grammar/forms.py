"""Conversion of the grammar forms that clients write to the one that llguidance reads.

A regular expression, and every choice, is to match the whole output. What llguidance itself
refuses is not looked at here: grammar.check finds it.
"""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.serving.grammar.completion_form import completion_form
from loraplex.serving.text.chat_format import CompletionGrammar, read_completion_grammar
from loraplex.serving.text.tool_calls.lark import pattern_of

MAX_EBNF_CHARACTERS: Final = 1 << 16
"""Their conversion is Python: a longer one would hold up others."""
_COMPACT: Final = " ?"
"""White space between the parts of a JSON text, where the schema sets no other in `x-guidance`.
Models that may indent fill `max_tokens` with blanks, small ones above all."""
_MAX_REASON: Final = 400
_TOO_DEEP: Final = "it is nested too deep"
_GBNF_ESCAPE: Final = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def llguidance_form(grammar: Grammar) -> str:
    """The grammar in llguidance's own JSON form. Raises InvalidParameterError."""
    return _FORMS[grammar.kind](grammar.text)


def invalid(kind: GrammarKind, reason: str) -> InvalidParameterError:
    message = f"the {NAMES[kind]} is not valid: {_brief(reason)}"
    return InvalidParameterError(message, param="grammar")


def unsupported(kind: GrammarKind, reason: str) -> UnsupportedFeatureError:
    """Return the error for a valid grammar of which a part cannot be enforced."""
    message = f"the {NAMES[kind]} is not supported: {_brief(reason)}"
    return UnsupportedFeatureError(message, param="grammar")


def _brief(reason: str) -> str:
    """Shorten a reason: it may quote the grammar, and its beginning and end matter most."""
    if len(reason) <= 2 * _MAX_REASON:
        return reason
    return f"{reason[:_MAX_REASON]} ... {reason[-_MAX_REASON:]}"


NAMES: Final[Mapping[GrammarKind, str]] = MappingProxyType(
    {
        GrammarKind.JSON_SCHEMA: "JSON schema",
        GrammarKind.REGEX: "regular expression",
        GrammarKind.LARK: "Lark grammar",
        GrammarKind.EBNF: "EBNF grammar",
        GrammarKind.CHOICE: "list of choices",
        GrammarKind.MESSAGE: "grammar of the message",
        GrammarKind.LLGUIDANCE: "llguidance grammar",
    }
)


def parse_json(kind: GrammarKind, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise invalid(kind, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise invalid(kind, _TOO_DEEP) from error


def schema_form(schema: Mapping[str, Any] | str, options: Any = None) -> str:
    """Parse a JSON schema that is an object, or its text. Raises ValueError.

    options: its `x-guidance`. A default pattern would win over its `whitespace_flexible`.
    """
    is_rigid = isinstance(options, Mapping) and options.get("whitespace_flexible") is False
    return LLMatcher.grammar_from_json_schema(
        schema if isinstance(schema, str) else dict(schema),
        defaults={} if is_rigid else {"whitespace_pattern": _COMPACT},
    )


def _from_schema(text: str) -> str:
    schema = parse_json(GrammarKind.JSON_SCHEMA, text)
    if not isinstance(schema, dict):
        raise invalid(GrammarKind.JSON_SCHEMA, f"it must be an object, got {_shortened(text)}")
    try:
        return schema_form(text, schema.get("x-guidance"))
    except ValueError as error:
        is_deep = "recursion limit" in str(error)
        reason = _TOO_DEEP if is_deep else str(error)
        raise invalid(GrammarKind.JSON_SCHEMA, reason) from error


def _from_choices(text: str) -> str:
    choices = parse_json(GrammarKind.CHOICE, text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise invalid(GrammarKind.CHOICE, f"it must be a list of strings, got {_shortened(text)}")
    if not choices:
        raise invalid(GrammarKind.CHOICE, "it is empty")
    return LLMatcher.grammar_from_regex("|".join(map(pattern_of, choices)))


def _from_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]}, ensure_ascii=False)


def _from_ebnf(text: str) -> str:
    if len(text) > MAX_EBNF_CHARACTERS:
        raise invalid(
            GrammarKind.EBNF,
            f"it has {len(text)} characters; at most {MAX_EBNF_CHARACTERS} are allowed",
        )
    try:
        return _from_lark(any_to_lark(_GBNF_ESCAPE.sub(_plain_escape, text)))
    except RecursionError as error:
        raise invalid(GrammarKind.EBNF, _TOO_DEEP) from error
    except Exception as error:  # the converter raises nothing more exact
        raise invalid(GrammarKind.EBNF, str(error)) from error


def _plain_escape(match: re.Match[str]) -> str:
    r"""\u0041 as \x41, what is beyond ASCII as itself: the converter drops leading zeros."""
    digits = match[1] or match[2]
    if digits is None:  # an escaped backslash
        return match[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    is_character = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_character else match[0]


def message_form(completion: CompletionGrammar) -> str:
    return completion_form(completion, llguidance_form)


def _from_message(text: str) -> str:
    return message_form(read_completion_grammar(text))


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_FORMS: Final[Mapping[GrammarKind, Callable[[str], str]]] = MappingProxyType(
    {
        GrammarKind.JSON_SCHEMA: _from_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: _from_lark,
        GrammarKind.EBNF: _from_ebnf,
        GrammarKind.CHOICE: _from_choices,
        GrammarKind.MESSAGE: _from_message,
        GrammarKind.LLGUIDANCE: str,
    }
)
