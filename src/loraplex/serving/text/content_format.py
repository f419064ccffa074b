"""Whether a chat template wants a message's content as one text, or as OpenAI's list of parts.

Templates of models that read pictures, too, loop over the parts; for all others the parts of a text
are joined. It is read off the template: does it loop over the content of a message?
"""

from collections.abc import Iterator

import jinja2.nodes as nodes
import msgspec

_MAX_ALIASES = 8
"""How often a content is renamed, at most, on its way into a loop."""

_TESTS = frozenset(("string", "iterable", "sequence", "mapping"))


class ContentFormat(msgspec.Struct, frozen=True):
    takes_parts: bool = False
    """A list of parts may be given as it is."""
    only_parts: bool = False
    """A text has to be given as a list of one part, too."""


def content_format(template: nodes.Template) -> ContentFormat:
    """`template` is what Jinja's parse gave."""
    names = _names_of_content(template)
    loops = [
        loop.iter for loop in template.find_all(nodes.For) if _is_content(_bare(loop.iter), names)
    ]
    if not loops:
        return ContentFormat()
    tested = any(test.name in _TESTS for test in template.find_all(nodes.Test))
    passed_on = [*loops, *_indexed(template), *(value for _, value in _bindings(template))]
    looped = {id(_bare(value)) for value in passed_on}
    used = [node for node in template.find_all(nodes.Expr) if _is_content(node, names)]
    return ContentFormat(
        takes_parts=True, only_parts=not tested and all(id(node) in looped for node in used)
    )


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(ctx="load", name=name):
            return name in names
    return False


def _bare(node: nodes.Node) -> nodes.Node:
    """Return the node without filters and slices around it."""
    while True:
        match node:
            case nodes.Filter(node=nodes.Node() as inner):
                node = inner
            case nodes.Getitem(arg=nodes.Slice(), node=inner):
                node = inner
            case _:
                return node


def _indexed(template: nodes.Template) -> Iterator[nodes.Node]:
    """Yield the nodes of which an item is taken by number."""
    for item in template.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, int):
            yield item.node


def _names_of_content(template: nodes.Template) -> set[str]:
    """Variables and parameters of macros that hold some message's content, at any place."""
    names: set[str] = set()
    bindings = list(_bindings(template))
    for _ in range(_MAX_ALIASES):
        more = {name for name, value in bindings if _is_content(_bare(value), names)}
        if more <= names:
            break
        names |= more
    return names


def _bindings(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            yield from zip(parameters, call.args, strict=False)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)
