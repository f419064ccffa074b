"""Grammars that are written to hold a server up, or to fill it: one of each kind that we know."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.grammar import Grammar, GrammarKind


def hostile_grammars() -> Mapping[str, Grammar]:
    """Grammars by what they try."""
    made = {
        **{name: _json(GrammarKind.JSON_SCHEMA, schema) for name, schema in _schemas().items()},
        **{name: Grammar(GrammarKind.REGEX, text) for name, text in _REGEXES.items()},
        **{name: Grammar(GrammarKind.LARK, text) for name, text in _larks().items()},
        **{name: Grammar(GrammarKind.EBNF, text) for name, text in _EBNFS.items()},
        "choices-many": _json(GrammarKind.CHOICE, [f"{n * 7919:x}" for n in range(12_000)]),
        "choices-long": _json(GrammarKind.CHOICE, ["a" * 50_000, "a" * 50_001]),
        "llguidance-doubling": _grammars([f"start: @g{n + 1} @g{n + 1}" for n in range(60)]),
        "llguidance-itself": _grammars(["start: @g0 @g0 | @g0"]),
        "llguidance-many": _grammars(["start: /(a|b)*a(a|b){15}/"] * 900),
        "llguidance-own-limits": _own_limits(),
    }
    return MappingProxyType(made)


AMBIGUOUS: Final = 'start: a\na: a a a | "x" | ""\n'
"""Compiled at once; each token of its output takes longer than the one before."""


def _json(kind: GrammarKind, value: Any) -> Grammar:
    return Grammar(kind, json.dumps(value))


def _chain(length: int, link: Any, end: Any) -> dict[str, Any]:
    """Definitions that each name the next, as `link` makes them of a reference."""
    parts = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
    return {"$defs": {**parts, f"a{length}": end}, "$ref": "#/$defs/a0"}


def _schemas() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "reference-to-itself": {"$ref": "#"},
        "references-deep": _chain(900, lambda ref: {"anyOf": [ref, {"items": ref}]}, text),
        "any-of-doubling": _chain(60, lambda ref: {"anyOf": [ref, ref]}, text),
        "all-of-doubling": _chain(40, lambda ref: {"allOf": [ref, ref]}, text),
        "objects-doubling": _chain(
            40, lambda ref: {"properties": {"l": ref, "r": ref}, "required": ["l", "r"]}, text
        ),
        "enum-many": {"enum": [f"{n * 7919:x}" for n in range(9000)]},
        "enum-long": {"enum": ["x" * 90_000 + "a", "x" * 20_000]},
        "min-items": {"type": "array", "items": text, "minItems": 10**9},
        "max-items": {"type": "array", "items": text, "maxItems": 10**6},
        "prefix-items": {"type": "array", "prefixItems": [{"type": "integer"}] * 5000},
        "min-length": {"type": "string", "minLength": 10**9},
        "max-length": {"type": "string", "maxLength": 10**6},
        "lengths-many": {
            "properties": {f"p{n}": {"type": "string", "maxLength": 5000 + n} for n in range(300)}
        },
        "pattern-nested": {"type": "string", "pattern": "^((((a*)*)*)*)*$"},
        "pattern-counted": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
        "patterns-all-of": {
            "allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(1, 12)]
        },
        "pattern-properties": {
            "patternProperties": {f"^a{{{n}}}.*b.{{{n}}}$": text for n in range(1, 60)}
        },
        "properties-many": {"properties": {f"p{n}": text for n in range(3000)}},
        "numbers-ranges": {
            "properties": {
                f"p{n}": {"type": "integer", "minimum": n, "maximum": 10**12 + n}
                for n in range(500)
            }
        },
        "number-digits": {"type": "integer", "minimum": 10**300, "maximum": 10**4000},
        "multiple-of": {"type": "integer", "multipleOf": 999_983},
        "multiples-of": {
            "allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]
        },
        "one-of-many": {"oneOf": [{"properties": {f"k{n}": {"const": n}}} for n in range(400)]},
        "any-of-many": {"anyOf": [{"properties": {f"k{n}": text}} for n in range(700)]},
        "not-not": {"not": {"not": {"type": "string", "pattern": ".*a.{15}"}}},
        "nested": _nested(120),
    }


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


_REGEXES: Final = {
    "regex-nested": "((((((a*)*)*)*)*)*)*b",
    "regex-counted": "((a{1,100}){1,100}){1,100}",
    "regex-any-counted": "(.{1,1000}x){1,1000}",
    "regex-states": "(?s:.*)a(?s:.{22})",
    "regex-unicode": r"(\p{L}{1,100}\p{Lu}){1,100}",
    "regex-alternatives": "|".join(f"x{n}y.*" for n in range(5000)),
    "regex-optional": "a?" * 30_000 + "a" * 30_000,
    "regex-deep": "(" * 20_000 + "a" + ")" * 20_000,
    "regex-empty": "()*()*(|)*",
    "regex-look-around": "(?=.*a.{10})(?!b).*",
}


def _larks() -> dict[str, str]:
    doubling = "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40))
    many = "".join(f'r{n}: "x{n}" start\n' for n in range(3000))
    return {
        "lark-left": 'start: start "a" | start start | "b"',
        "lark-ambiguous": AMBIGUOUS,
        "lark-empty-loop": 'start: a\na: b | ""\nb: a | a b | b a a\n',
        "lark-endless": 'start: "a" start',
        "lark-doubling": f'start: a0\n{doubling}a40: "x" | ""\n',
        "lark-many": f"start: {' | '.join(f'r{n}' for n in range(3000))}\n{many}",
        "lark-repeated": 'start: ("a" | "b" start){1,100000}\n',
        "lark-intersection": "start: T\nT: /.*a.{12}/ & /.*b.{13}/ & ~/.*c.{14}/\n",
        "lark-deep": f'start: {"(" * 5000}"a"{")" * 5000}',
    }


_EBNFS: Final = {
    "ebnf-left": 'root ::= root root | "a" |',
    "ebnf-deep": f'root ::= {"(" * 3000}"a"{")" * 3000}',
    "ebnf-many": "root ::= " + " | ".join(f'"{n}"' for n in range(6000)),
    "ebnf-counted": "root ::= [a-z]{1,100000}",
    "ebnf-comment": f'{"#" * 60_000}\nroot ::= "a"',
}


def _grammars(larks: list[str]) -> Grammar:
    """Grammars in llguidance's form, with all rules that the last one may name."""
    named = [{"name": f"g{n}", "lark_grammar": lark} for n, lark in enumerate(larks)]
    last = {"name": f"g{len(larks)}", "lark_grammar": 'start: "x" | ""'}
    return _json(GrammarKind.LLGUIDANCE, {"grammars": [*named, last]})


def _own_limits() -> Grammar:
    """The grammar needs more than the server allows."""
    names = ("max_lexer_states", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items")
    grammars = [{"lark_grammar": "start: /(?s:.*)a(?s:.{22})/"}]
    limits = dict.fromkeys(names, 10**12)
    return _json(GrammarKind.LLGUIDANCE, {"grammars": grammars, "limits": limits})
