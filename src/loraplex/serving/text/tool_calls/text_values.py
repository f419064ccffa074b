"""Arguments that are written as text, each in a frame, as rules of a grammar."""

import json
from collections.abc import Mapping
from typing import Any

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.parameters import properties, required, types


def members_rule(lark: Lark, tool: FunctionTool, before: str, after: str) -> str:
    """The arguments in their schema's order; those that are not required may be left out.

    `before` has `{}` in the place of an argument's name. Of a string the schema's `enum` and
    `const` hold; its other keywords say nothing of a text that is not quoted.
    """
    if "properties" not in tool.parameters:
        return _any_members(lark, before, after)
    needed = required(tool)
    rules = []
    for name, schema in properties(tool).items():
        head = lark.text(before.replace("{}", name))
        rule = f"{head} {_value_rule(lark, schema, after)}"
        rules.append(rule if name in needed else f"({rule})?")
    return lark.rule(" ".join(rules) or '""')


def _any_members(lark: Lark, before: str, after: str) -> str:
    start, _, end = before.partition("{}")
    name = lark.regex("[a-zA-Z0-9_-]{1,64}")
    return lark.rule(f"({lark.text(start)} {name} {lark.text(end)} {lark.any_until(after)})*")


def _value_rule(lark: Lark, schema: Mapping[str, Any], after: str) -> str:
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(allowed, list) and allowed:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in allowed]
        return f"({' | '.join(map(lark.text, texts))}) {lark.text(after)}"
    if types(schema) == {"string"}:
        return lark.any_until(after)
    return f"{lark.json(schema)} {lark.text(after)}"
