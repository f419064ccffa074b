"""What the filters of templates and the methods of their values cost at most, and which exist.

What is not named here is not there for a template: nothing runs of which the cost is unknown.
Left out of Jinja's filters are pprint, striptags, urlize, wordwrap and xmlattr, which are for web
pages and slow on hostile text.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2.filters
import jinja2.tests

from loraplex.serving.text.template_meter import (
    CALL,
    ITEM,
    checked_number,
    current_meter,
    shallow_weight,
    too_large,
)

_WIDEST = 10_000
"""Columns that a template may pad to."""

_CHAR = 4
"""Bytes of a character at most."""

METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find"),
            *("index", "isalnum", "isalpha", "isascii", "isdecimal"),
            *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace"),
            *("istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition"),
            *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust"),
            *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
            *("swapcase", "title", "upper", "zfill"),
        )
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index", "grouper", "list")),
    range: frozenset(("count", "index", "start", "stop", "step")),
    int: frozenset(("bit_length", "real", "imag", "numerator", "denominator")),
    float: frozenset(("is_integer", "real", "imag")),
    bytes: frozenset(),
    complex: frozenset(),
}
"""The attributes that a template may read, of the values that have many. `format` and `format_map`
are there, too, in the sandbox's own form."""

_FILTERS = frozenset(jinja2.filters.FILTERS) - {
    *("pprint", "striptags", "urlize", "wordwrap", "xmlattr"),
}
_LAZY_FILTERS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list"),
        *("map", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr"),
        *("slice", "safe"),
    )
)
"""They look at no more than the outside of a value; what they apply to its items pays itself."""

_TEXT_FILTERS = frozenset(
    (
        *("capitalize", "center", "e", "escape", "filesizeformat", "float", "forceescape"),
        *("format", "indent", "int", "lower", "replace", "string", "title", "truncate", "upper"),
        *("urlencode", "wordcount"),
    )
)
"""They take a text as a whole, not its characters one by one."""

_SORTING_FILTERS = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))

_WALKING_TESTS = frozenset(("lower", "upper"))
_COMPARING_TESTS = {
    **dict.fromkeys(("==", "eq", "equalto"), "eq"),
    **dict.fromkeys(("!=", "ne"), "ne"),
    **dict.fromkeys((">", "gt", "greaterthan"), "gt"),
    **dict.fromkeys((">=", "ge"), "gteq"),
    **dict.fromkeys(("<", "lt", "lessthan"), "lt"),
    **dict.fromkeys(("<=", "le"), "lteq"),
    "in": "in",
}

Compare = Callable[[str, Any, Any], bool]


def metered_filters() -> dict[str, Callable[..., Any]]:
    return {name: _metered_filter(name, jinja2.filters.FILTERS[name]) for name in _FILTERS}


def metered_tests(compare: Compare) -> dict[str, Callable[..., Any]]:
    """`compare` takes the name of an operator and both sides."""
    tests: dict[str, Any] = {**jinja2.tests.TESTS}
    for name in _WALKING_TESTS:
        tests[name] = _walking_test(tests[name])
    for name, operator in _COMPARING_TESTS.items():
        tests[name] = functools.partial(compare, operator)
    return tests


def listed(value: Any) -> Any:
    """What a value gives, if it gives it only once; else the value."""
    return list(current_meter().paid(value)) if isinstance(value, Iterator) else value


def pay_for_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Of a method of a str, dict, list or tuple, before it is called."""
    meter = current_meter()
    arguments = (*args, *kwargs.values())
    for argument in arguments:
        meter.pay(meter.weight(argument))
    if isinstance(owner, str):
        meter.pay(3 * owner.__sizeof__() + _cost_of_str_method(owner, name, arguments))
    elif name in ("count", "index"):
        meter.pay(meter.weight(owner) + shallow_weight(owner) * _text_size(arguments))
    else:
        meter.pay(shallow_weight(owner))


def pay_for_percent(template: str, values: Any) -> None:
    """For `template % values`."""
    _pay_for_form(template, _WIDE_PERCENT, template.count("%"), values)


def pay_for_format(template: str, values: Any) -> None:
    """For `template.format(values)`."""
    _pay_for_form(template, _WIDE_FORMAT, template.count("{"), values)


def _pay_for_form(template: str, wide: re.Pattern[str], num_fields: int, values: Any) -> None:
    meter = current_meter()
    # Looking for a wide field takes so much at worst; a form is short.
    meter.pay(len(template) ** 2)
    if wide.search(template):
        raise too_large("a text that is padded too wide")
    meter.pay((num_fields + 1) * (4 * meter.weight(values) + _FIELD))


_FIELD = 4096
"""Bytes that a field of less than a thousand columns takes, beside its value."""

# A width of four digits and more, or one that is taken from the values.
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0.\d]*(?:\d{4}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0
    own_cost = _OWN_COSTS.get(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        hidden, shown = args[:num_hidden], tuple(listed(arg) for arg in args[num_hidden:])
        meter.pay(CALL + _cost_of_filter(name, shown, kwargs))
        if own_cost is not None:
            meter.pay(own_cost(_Arguments(shown, kwargs)))
        result = function(*hidden, *shown, **kwargs)
        if isinstance(result, Iterator):
            return _again(list(meter.paid(result)))
        return checked_number(result)

    return call


def _cost_of_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    value, others = args[0] if args else None, (*args[1:], *kwargs.values())
    meter = current_meter()
    num_items = len(value) if isinstance(value, str | list | tuple | dict | range) else 1
    per_item = _text_size(others)
    if name in _LAZY_FILTERS:
        return shallow_weight(value) + num_items * per_item
    cost = 4 * meter.weight(value) + sum(meter.weight(other) for other in others)
    if name in _SORTING_FILTERS:
        cost *= num_items.bit_length() + 1
    return cost + (0 if name in _TEXT_FILTERS else num_items * per_item)


def _walking_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: Any) -> bool:
        current_meter().pay_for_text(value)
        return bool(function(value))

    return call


def _again(items: list[Any]) -> Iterator[Any]:
    yield from current_meter().paid(items)


def _text_size(values: tuple[Any, ...]) -> int:
    return sum(value.__sizeof__() for value in values if isinstance(value, str))


# ------------------------------------------------------------------ what makes much of little


def _cost_of_str_method(text: str, name: str, args: tuple[Any, ...]) -> int:
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return _width(args[0] if args else 0) * _CHAR
        case "expandtabs":
            return text.count("\t") * _width(args[0] if args else 8) * _CHAR
        case "replace":
            return _cost_of_replace(text, *args[:2])
        case "join":
            items = args[0] if args else ()
            return text.__sizeof__() * (len(items) if hasattr(items, "__len__") else 1)
        case "split" | "rsplit" | "splitlines":
            separator = args[0] if args and isinstance(args[0], str) else None
            num_parts = text.count(separator) if separator else len(text)
            search = _cost_of_search_from_the_right(text, args) if name == "rsplit" else 0
            return 2 * ITEM * (num_parts + 1) + search
        case "strip" | "lstrip" | "rstrip":
            return len(text) * len(args[0]) if args and isinstance(args[0], str) else 0
        case "rfind" | "rindex" | "rpartition":
            return _cost_of_search_from_the_right(text, args)
    return 0


def _cost_of_search_from_the_right(text: str, args: tuple[Any, ...]) -> int:
    """Python has no fast one: at worst it compares the whole at each place."""
    return len(text) * len(args[0]) // 8 if args and isinstance(args[0], str) else 0


def _cost_of_replace(text: Any, old: Any = "", new: Any = "") -> int:
    if not (isinstance(old, str) and isinstance(new, str)):
        return ITEM
    return str(text).count(old) * len(new) * _CHAR


def _width(value: Any) -> int:
    if isinstance(value, int) and value > _WIDEST:
        raise too_large(f"a width of more than {_WIDEST}")
    return abs(value) if isinstance(value, int) else 0


class _Arguments:
    """Of a filter; the first is the value."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


def _cost_of_indent(given: _Arguments) -> int:
    current_meter().pay(8 * len(str(given.args[0])))
    width = given.get(1, "width", 4)
    columns = len(width) if isinstance(width, str) else _width(width)
    return (len(str(given.args[0]).splitlines()) + 1) * (columns * _CHAR + ITEM)


def _cost_of_round(given: _Arguments) -> int:
    precision = given.get(1, "precision", 0)
    if isinstance(precision, int) and abs(precision) > 300:
        raise too_large("a number that is too large by round")
    return ITEM


def _cost_of_sum(given: _Arguments) -> int:
    if isinstance(given.get(2, "start"), str | list | tuple):
        raise too_large("a list by sum; use + instead")
    return ITEM


def _cost_of_format(given: _Arguments) -> int:
    pay_for_percent(str(given.args[0]), given.kwargs or given.args[1:])
    return ITEM


def _cost_of_list(given: _Arguments) -> int:
    return 2 * ITEM * len(given.args[0]) if isinstance(given.args[0], str) else 0


_OWN_COSTS: Mapping[str, Callable[[_Arguments], int]] = {
    "batch": lambda given: ITEM * _width(given.get(1, "linecount")),
    "center": lambda given: _CHAR * _width(given.get(1, "width", 80)),
    "format": _cost_of_format,
    "indent": _cost_of_indent,
    "list": _cost_of_list,
    "replace": lambda given: _cost_of_replace(
        given.args[0], given.get(1, "old"), given.get(2, "new")
    ),
    "round": _cost_of_round,
    "slice": lambda given: 2 * ITEM * _width(given.get(1, "slices")),
    "sum": _cost_of_sum,
    "urlencode": lambda given: 3 * current_meter().weight(given.args[0]),
}
"""By name of a filter: beside what its values weigh."""
