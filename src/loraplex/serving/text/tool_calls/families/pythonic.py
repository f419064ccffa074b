"""Llama 4, and Llama 3.2's small ones if requested: `[f(a=1, b="x"), g()]` is the whole output.

The values are Python's literals; JSON's true, false and null are taken, too.
"""

import ast
from typing import Any, Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, read_whole
from loraplex.serving.text.tool_calls.json_text import MAX_DEPTH, CutError, MalformedError
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.parameters import (
    ArgumentPieces,
    json_text,
    properties,
    required,
)
from loraplex.serving.text.tool_calls.reader import (
    MAX_NAME_CHARACTERS,
    CallReader,
)

_START, _END = "<|python_start|>", "<|python_end|>"
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_BEHIND_STRING: Final = ("", ",", ")", "]", "}", ":")
_ESCAPES: Final = frozenset("\n\\'\"abfnrtvxuUN01234567")
"""Characters that Python knows after a backslash."""
_NO_NAME: Final = frozenset(" \t\r\n=,*()[]{}\"'")
_NAMES: Final = {"true": True, "false": False, "null": None}


def call_rule(lark: Lark, tool: FunctionTool) -> str:
    """The required arguments in their order, then any of the others."""
    if "properties" not in tool.parameters:
        return f'{lark.text(f"{tool.name}(")} ({_any_arguments(lark)})? ")"'
    parts = {name: lark.json(schema) for name, schema in properties(tool).items()}
    needed = [name for name in parts if name in required(tool)]
    optional = [name for name in parts if name not in needed]
    rules = [f"{lark.text(f'{name}=')} {parts[name]}" for name in needed]
    expression = f" {lark.text(', ')} ".join(rules)
    if needed:
        for name in optional:
            expression += f" ({lark.text(f', {name}=')} {parts[name]})?"
    elif optional:
        expression = f"({_some_of(lark, optional, parts)})?"
    return " ".join(part for part in (lark.text(f"{tool.name}("), expression, '")"') if part)


def _any_arguments(lark: Lark) -> str:
    argument = lark.rule(f'{lark.regex("[a-zA-Z_][a-zA-Z0-9_]{0,63}")} "=" {lark.json({})}')
    return f'{argument} (", " {argument})*'


def _some_of(lark: Lark, names: list[str], parts: dict[str, str]) -> str:
    """Return a pattern for at least one of them, in their order."""
    choices = []
    for index, name in enumerate(names):
        rest = "".join(f" ({lark.text(f', {n}=')} {parts[n]})?" for n in names[index + 1 :])
        choices.append(f"{lark.text(f'{name}=')} {parts[name]}{rest}")
    return lark.choice(choices)


class Pythonic(OurIds):
    name = "pythonic"
    markers = (_START, _END)
    syntax = CallSyntax(
        trigger="",
        before="[",
        between=", ",
        after="]",
        call=call_rule,
        first="[<",
        marked=CallSyntax(
            trigger=_START,
            before=f"{_START}[",
            between=", ",
            after=f"]{_END}",
            call=call_rule,
        ),
    )

    def recognises(self, template: str) -> bool:
        return "func_name1(" in template or _START in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_whole(reader, _calls(reader), self.markers)


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    while (yield from reader.optional(_START)) is not None:
        pass
    yield from reader.take_space()
    yield from reader.expect("[")
    yield from read_python_calls(reader, known_only=True)
    yield from reader.optional(_END)
    reader.settle()


def read_python_calls(reader: CallReader, *, known_only: bool = False) -> Steps[None]:
    """Read a list of calls, after its first bracket. known_only: of the request's functions."""
    while True:
        yield from reader.take_space()
        yield from _call(reader, known_only=known_only)
        yield from reader.take_space()
        is_end = (yield from reader.expect(",", "]")) == "]"
        if is_end or (yield from reader.optional("]")) is not None:
            break
        reader.settle()
    reader.settle()


def _call(reader: CallReader, *, known_only: bool) -> Steps[None]:
    name = yield from reader.name(known_only=known_only)
    yield from reader.expect("(")
    pieces = ArgumentPieces()
    arguments = ""
    while (yield from reader.optional(")")) is None:
        yield from reader.take_space()
        argument = yield from _argument_name(reader)
        yield from reader.take_space()
        yield from reader.expect("=")
        value = _json_of((yield from _literal(reader)))
        arguments += pieces.member(argument, value)
        if (yield from reader.expect(",", ")")) == ")":
            break
    # Known to be one only now: an argument may be an expression that is not evaluated.
    reader.whole_call(name, arguments + pieces.end())


def _argument_name(reader: CallReader) -> Steps[str]:
    """Return a pattern for names of properties, without the characters of Python's syntax."""
    name = ""
    while (char := (yield from reader.peek())) and char not in _NO_NAME:
        name += reader.take(1)
        if len(name) > MAX_NAME_CHARACTERS:
            raise MalformedError
    if not char:
        raise CutError
    if not name:
        raise MalformedError
    return name


def _literal(reader: CallReader) -> Steps[str]:
    """Take the text of a value: up to the comma or bracket that ends it."""
    text = ""
    closing: list[str] = []
    while True:
        char = yield from reader.peek()
        if not char:
            raise CutError
        if len(closing) > MAX_DEPTH:
            raise MalformedError
        if char in "\"'":
            text += yield from _quoted(reader, is_raw=text[-1:] in ("r", "R"))
            continue
        if not closing and char in ",)":
            return text
        if char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in ")]}" and (not closing or closing.pop() != char):
            raise MalformedError
        text += reader.take(1)


def _quoted(reader: CallReader, *, is_raw: bool) -> Steps[str]:
    """Take a string as Python can read it: raw line breaks, quotes and other backslashes within it
    get the escapes that they lack."""
    quote = text = reader.take(1)
    if (yield from reader.starts_with((quote * 2,))) is not None:
        quote = text = quote + reader.take(2)
    while True:
        char = yield from reader.peek()
        if not char:
            raise CutError
        if char == "\\":
            following = yield from reader.peek(1)
            if not following:
                raise CutError
            is_known = is_raw or following in _ESCAPES
            text += reader.take(2) if is_known else "\\" + reader.take(1)
        elif (yield from reader.starts_with((quote,))) is None:
            text += _escaped(reader.take(1), is_long=len(quote) > 1)
        elif len(quote) > 1 or (yield from _closes(reader, quote)):
            return text + reader.take(len(quote))
        else:
            text += "\\" + reader.take(1)


def _escaped(char: str, *, is_long: bool) -> str:
    return char if is_long else {"\n": "\\n", "\r": "\\r"}.get(char, char)


def _closes(reader: CallReader, quote: str) -> Steps[bool]:
    """Whether the quote that is next ends its string: what follows is what may follow a string."""
    char, ahead = yield from reader.visible(1)
    if char != quote:
        return char in _BEHIND_STRING
    # Another string to join, unless that one has no beginning.
    return (yield from reader.visible(ahead + 1))[0] not in _BEHIND_STRING


def _json_of(text: str) -> str:
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return json_text(value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedError from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(
            op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)
        ):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedError
