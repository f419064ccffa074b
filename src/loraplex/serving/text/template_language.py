"""The language of chat templates, bounded: Jinja as transformers' apply_chat_template gives it.

That is trim_blocks, lstrip_blocks, loop controls, `generation` blocks, `tojson`,
`raise_exception` and `strftime_now`. A template is code that came with a model; it runs in Jinja's
immutable sandbox, and in this one:

- every pass of a loop and every call of a macro pays for the code that it may run;
- every operator, filter, test, call and output pays for its values (`template_meter`);
- of values, only the attributes of `template_costs.METHODS` can be read.

For this the parsed template is rewritten: what Jinja would do by an operator of Python becomes a
call of a method here.
"""

import datetime
import json
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2.visitor import NodeTransformer

from loraplex.serving.text import template_costs as costs
from loraplex.serving.text.template_meter import (
    CALL,
    ITEM,
    MACRO,
    check_power,
    checked_number,
    current_meter,
    shallow_weight,
    too_large,
)

MAX_SOURCE_CHARS = 2**18
MAX_RANGE_ITEMS = 100_000
"""Of all ranges of one rendering together."""
_MAX_ERROR_CHARS = 2000
_MAX_TIME_FORMAT_CHARS = 200
_MAX_INDENT = 64


class BoundedRange:
    """`range` for one rendering: all its ranges share one allowance."""

    def __init__(self) -> None:
        self._room = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._room -= len(numbers)
        if self._room < 0:
            raise too_large(f"ranges of more than {MAX_RANGE_ITEMS} items")
        return numbers


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates; `range` comes with the variables of a rendering (`BoundedRange`)."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, now: Callable[[], datetime.datetime], json_indent: int | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_pay_for_output,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        del self.globals["lipsum"]
        self.globals["dict"] = _dict
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: _time(now(), form)
        self.filters.clear()
        self.filters.update(costs.metered_filters(), tojson=_json_filter(json_indent))
        self.tests.update(costs.metered_tests(_compare))
        self.paid_step = _pay_for_step
        self.paid_compare = _compare
        self.paid_concat = _concat
        self.paid_slice = _slice
        self.paid_key = _pay_for_key

    def template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError, and what Python raises for code that it cannot compile."""
        if len(source) > MAX_SOURCE_CHARS:
            raise jinja2.TemplateSyntaxError(f"it has more than {MAX_SOURCE_CHARS} characters", 1)
        tree: nodes.Template = _Rewriter().visit(self.parse(source))
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in costs.METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        if isinstance(obj, type | types.FunctionType | types.MethodType | types.BuiltinMethodType):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _pay_for_key(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def paid_format(*args: Any, **kwargs: Any) -> str:
            costs.pay_for_format(value.__self__, [*args, kwargs])
            return function(*args, **kwargs)

        return paid_format

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        meter = current_meter()
        match operator, left, right:
            case "**", _, _:
                check_power(left, right)
            case ("*", str() | list() | tuple() as items, int(times)) | (
                "*",
                int(times),
                str() | list() | tuple() as items,
            ):
                size = 4 * len(items) if isinstance(items, str) else ITEM * len(items)
                meter.pay(size * max(times, 0))
            case "%", str(), _:
                costs.pay_for_percent(left, right)
            case _:
                meter.pay(shallow_weight(left) + shallow_weight(right))
        result = checked_number(super().call_binop(context, operator, left, right))
        if isinstance(result, list) and operator == "+":
            meter.note_joined(result, left, right)
        return result

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if __obj is _pay_for_step:
            return _pay_for_step(args[0])
        current_meter().pay(CALL)
        owner = getattr(__obj, "__self__", None)
        if not isinstance(owner, _METERED_OWNERS):
            return super().call(__context, __obj, *args, **kwargs)
        listed = tuple(costs.listed(arg) for arg in args)
        shown = {key: kwargs[key] for key in kwargs.keys() - _HIDDEN_ARGUMENTS}
        costs.pay_for_method(owner, __obj.__name__, listed, shown)
        return super().call(__context, __obj, *listed, **kwargs)


_METERED_OWNERS = (str, dict, list, tuple, jinja2.runtime.LoopContext)
_HIDDEN_ARGUMENTS = {"_loop_vars", "_block_vars", "caller"}
"""Which Jinja adds to every call."""


class _Rewriter(NodeTransformer):
    """Makes a template pay. Raises TemplateSyntaxError for what is not served."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            name = type(node).__name__
            raise jinja2.TemplateSyntaxError(f"{name} is not served in chat templates", node.lineno)
        cost = _cost(node) if isinstance(node, _BODIES) else 0
        super().generic_visit(node, *args, **kwargs)
        _pay_for_spread(node)
        if isinstance(node, _BODIES):
            step = _call("paid_step", [nodes.Const(cost)], node.lineno)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                step = _call("paid_step", [nodes.Const(cost)], node.lineno)
                node.test = nodes.And(step, node.test).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("paid_concat", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1:
            sides = [node.expr, node.ops[0].expr]
            return _call("paid_compare", [nodes.Const(node.ops[0].op), *sides], node.lineno)
        node.expr = _call("paid_key", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = _call("paid_key", [operand.expr], node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (part.start, part.stop, part.step)]
        return _call("paid_slice", [node.node, *bounds], node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call("paid_key", [node.key], node.lineno)
        return node


_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
_REFUSED = (
    *(nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport),
    nodes.ScopedEvalContextModifier,
)


def _pay_for_spread(node: nodes.Node) -> None:
    """f(*values) copies them."""
    for field in ("dyn_args", "dyn_kwargs"):
        spread = getattr(node, field, None)
        if spread is not None:
            setattr(node, field, _call("paid_key", [spread], node.lineno))


def _cost(node: nodes.Node) -> int:
    """Of one pass: for each node of the code, and for its plain text."""
    children = list(node.find_all(nodes.Node))
    text = sum(len(child.data) for child in children if isinstance(child, nodes.TemplateData))
    return len(children) * ITEM + text + (0 if isinstance(node, nodes.For) else MACRO)


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name)
    call = nodes.Call(function, args, [], None, None)
    call.set_lineno(line, override=True)
    return call


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote; only training needs it."""

    tags = {"generation"}  # noqa: RUF012 (read by Jinja under this name and type)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """As in transformers: no name that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *others = args
        values = _dict(*others, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace takes no name with an underscore first: {name!r}")


# ------------------------------------------------------------------ what pays


def _pay_for_step(units: int) -> bool:
    current_meter().pay(units)
    return True


@jinja2.pass_context
def _pay_for_output(_context: jinja2.runtime.Context, value: Any) -> Any:
    # A filter that needs the context is not run at compile time, where nobody pays.
    current_meter().pay_for_text(value)
    return value


def _pay_for_key(value: Any) -> Any:
    """The value, which will be hashed or compared."""
    current_meter().pay(current_meter().weight(value))
    return value


def _concat(*values: Any) -> str:
    for value in values:
        current_meter().pay_for_text(value)
    return jinja2.runtime.str_join(values)


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    current_meter().pay(shallow_weight(value))
    return value[start:stop:step]


_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}


def _compare(name: str, left: Any, right: Any) -> bool:
    current_meter().pay(_cost_of_comparison(name, left, right))
    return _COMPARISONS[name](left, right)


def _cost_of_comparison(name: str, left: Any, right: Any) -> int:
    meter = current_meter()
    if name not in ("in", "notin"):
        if isinstance(left, str) and isinstance(right, str):
            return min(len(left), len(right)) * 4 + ITEM
        both = isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS)
        return meter.weight(left) + meter.weight(right) if both else ITEM
    if isinstance(left, _CONTAINERS):
        return meter.weight(left) + meter.weight(right)
    if isinstance(right, dict) or not isinstance(left, str):
        return shallow_weight(right)
    return shallow_weight(right) + (0 if isinstance(right, str) else _num(right) * len(left) * 4)


_CONTAINERS = (list, tuple, dict)


def _num(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | range) else 1


# ------------------------------------------------------------------ what templates call


def _dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    for value in pairs:
        _pay_for_key(value)
    return dict(*pairs, **values)


def _raise_exception(message: Any) -> None:
    current_meter().pay_for_text(message)
    raise jinja2.TemplateError(str(message)[:_MAX_ERROR_CHARS])


def _time(moment: datetime.datetime, form: str) -> str:
    """The C library pads a number to any width that a format gives."""
    if len(form) > _MAX_TIME_FORMAT_CHARS or any(char.isdigit() for char in form):
        raise too_large("a time by a format that is too long or has a width")
    return moment.strftime(form)


def _json_filter(default_indent: int | None) -> Callable[..., str]:
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = default_indent,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own escapes HTML, which a prompt must not."""
        meter = current_meter()
        width = indent if isinstance(indent, int) else len(indent or "")
        if width > _MAX_INDENT or sum(map(len, separators or ())) > _MAX_INDENT:
            raise too_large(f"JSON with an indent of more than {_MAX_INDENT}")
        meter.pay(6 * meter.weight(value))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        # With an indent, a deep value makes much of little, so each chunk pays.
        return "".join(_paid_text(encoder.iterencode(value)))

    return to_json


def _paid_text(chunks: Any) -> Any:
    for chunk in chunks:
        current_meter().pay(len(chunk))
        yield chunk
