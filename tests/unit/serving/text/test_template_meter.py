"""What values weigh, and what is paid before something is made of them."""

import datetime
import re

import pytest
from jinja2 import TemplateError
from jinja2.utils import Namespace

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.template_language import BoundedRange, TemplateEnvironment
from loraplex.serving.text.template_meter import (
    ITEM,
    Meter,
    check_power,
    checked_number,
    current_meter,
    metered,
)

NOW = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("num_messages", "units"), [(1, 2**27 + 2**19), (3, 2**27 + 3 * 2**19), (10**6, 2**29)]
)
def test_an_allowance_ends(num_messages, units):
    meter = Meter(num_messages)
    meter.pay(units)
    with pytest.raises(InvalidRequestError, match="more work than any conversation needs"):
        meter.pay(1)


@pytest.mark.parametrize(
    ("value", "least"),
    [
        ("a" * 1000, 1000),
        ("é" * 1000, 1000),
        ("日" * 1000, 2000),
        (["a" * 1000] * 3, 3000),
        (("a" * 1000, [1]), 1000 + ITEM),
        ({"a" * 1000: "b" * 2000}, 3000),
        ({"a" * 1000: 1}.keys(), 1000),
        ({1: "a" * 1000}.values(), 1000),
        ({1: ["a" * 1000]}.items(), 1000),
        (range(1000), 1000),
        (1.5, ITEM),
    ],
    ids=[
        "ascii",
        "latin",
        "wide",
        "list",
        "tuple",
        "dict",
        "keys",
        "values",
        "items",
        "range",
        "1",
    ],
)
def test_a_value_weighs_at_least_its_bytes(value, least):
    assert Meter().weight(value) >= least


def test_a_namespace_has_no_weight():
    with pytest.raises(InvalidRequestError, match="text of a namespace"):
        Meter().weight([Namespace()])


def test_what_is_in_a_value_twice_is_looked_at_once():
    value = ["x"]
    for _ in range(60):
        value = [value, value]
    assert Meter().weight(value) > 2**60


def test_a_value_that_is_gone_has_left_no_weight():
    meter = Meter()
    for size in (1, 1000, 100_000):
        assert meter.weight(["a" * size]) > size


def test_looking_at_a_value_is_paid():
    with pytest.raises(InvalidRequestError, match="more work"):
        Meter().weight([0] * (2**21 + 2**14))


def test_a_meter_is_for_its_own_rendering():
    meter = Meter()
    with metered(meter):
        inner = Meter()
        with metered(inner):
            assert current_meter() is inner
        assert current_meter() is meter
    assert current_meter() is not meter


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_have_so_many_bits(sign):
    most = sign * (2**4096 - 1)
    assert checked_number(most) == most
    with pytest.raises(InvalidRequestError, match="a number that is too large"):
        checked_number(most + sign)


def test_powers():
    check_power(2, 2048)
    check_power(2**4000, -5)
    check_power(1.5, 10**6)
    with pytest.raises(InvalidRequestError, match="too large by"):
        check_power(2, 2049)


def paid(expression, **values):
    """Units for a value that a template makes and does not write."""
    template = TemplateEnvironment(lambda: NOW, None).template(f"{{% set x = {expression} %}}")
    meter = Meter()
    before = meter._left
    with metered(meter):
        template.render(values, range=BoundedRange())
    return before - meter._left


LONG = "a" * 1000
VALUES = {
    "x": "x",
    "long": LONG,
    "other": "a" * 999 + "b",
    "accents": "é" * 1000,
    "zeros": "\0" * 1000,
    "tabs": "\t" * 100,
    "lines": "\n" * 100,
    "items": [LONG] * 100,
    "others": [LONG] * 100,
    "pairs": [[LONG, 1]] * 100,
    "numbers": [1] * 1000,
}

MADE = {
    "x.center(9000)": 9000,
    "x.ljust(9000)": 9000,
    "x.rjust(9000)": 9000,
    "x.zfill(9000)": 9000,
    "x | center(9000)": 9000,
    "x | center(width=9000)": 9000,
    "tabs.expandtabs(90)": 100 * 90,
    "tabs.expandtabs()": 100 * 8,
    "long.join(items)": 200 * 1000,
    "items | join(long)": 200 * 1000,
    "long.replace('a', long)": 1000 * 1000,
    "long | replace('a', long)": 1000 * 1000,
    "long | replace('a', new=long)": 1000 * 1000,
    "long.split('a')": 1001 * ITEM,
    "long.splitlines()": 1000 * ITEM,
    "long | list": 1000 * ITEM,
    "lines | indent(1000)": 100 * 1000,
    "lines | indent(width=1000)": 100 * 1000,
    "lines | indent(long)": 100 * 1000,
    "numbers | batch(9000) | list": 9000 * 8,
    "numbers | slice(9000) | list": 9000 * ITEM,
    "numbers | map('string') | list": 1000 * ITEM,
    "'%s%s%s' % (long, long, long)": 3000,
    "'%(a)s%(a)s' % {'a': items}": 2 * 100 * 1000,
    "'%s%s' | format(items, items)": 2 * 100 * 1000,
    "'%(a)s%(a)s' | format(a=items)": 2 * 100 * 1000,
    "'{0}{0}{0}'.format(items)": 3 * 100 * 1000,
    "'{a}{a}{a}'.format(a=items)": 3 * 100 * 1000,
    "('%(a)s' * 50) % {'a': items}": 50 * 100 * 1000,
    "('{0}' * 50).format(items)": 50 * 100 * 1000,
    "accents | urlencode": 6000,
    "zeros | string": 1000,
    "[zeros] | string": 4000,
    "zeros ~ [zeros]": 5000,
    "[zeros] | tojson": 6000,
    "items + items": 200 * 8,
    "long + long": 2000,
    "long * 50": 50 * 1000,
    "50 * long": 50 * 1000,
    "items * 50": 50 * 100 * 8,
    "long[1:900]": 899,
    "items[1:90]": 89 * 8,
    "items | upper": 100 * 1000,
    "dict(pairs)": 100 * 1000,
    "range(9000) | list": 9000 * 8,
}
"""What an expression makes: bytes, at least."""

LOOKED_AT = {
    "long == other": 1000,
    "items == others": 100 * 1000,
    "other in items": 100 * 1000,
    "items in [others]": 100 * 1000,
    "items.count(other)": 100 * 1000,
    "items.index(long)": 1000,
    "{long: 1}": 1000,
    "{}[(long, long)]": 2000,
    "long % ()": 1000 * 1000,
    "long.format()": 1000 * 1000,
    "long.strip(long)": 1000 * 1000,
    "long.rfind(other)": 1000 * 999 // 8,
    "long.rsplit(other)": 1000 * 999 // 8,
    "long.rpartition(other)": 1000 * 999 // 8,
    "long is upper": 1000,
    "items is eq(others)": 100 * 1000,
    "other is in(items)": 100 * 1000,
    "items | select('in', long) | list": 100 * 1000,
    "items | sort": 100 * 1000 * 6,
    "items | unique | list": 100 * 1000,
    "items | first": ITEM,
    "1 < 2 < 3": ITEM,
    "'a' < long < items[0]": 2000,
}
"""What an expression may look at before it has its value: bytes, at least."""


REFUSED = {
    "x.center(10001)": "a width of more than 10000",
    "x.zfill(10001)": "a width of more than 10000",
    "x.expandtabs(10001)": "a width of more than 10000",
    "x | center(10001)": "a width of more than 10000",
    "x | indent(10001)": "a width of more than 10000",
    "items | batch(10001) | list": "a width of more than 10000",
    "items | slice(10001) | list": "a width of more than 10000",
    "'%1000d' % 1": "padded too wide",
    "'%-+ #1000d' % 1": "padded too wide",
    "'%.1000f' % 1": "padded too wide",
    "'%*d' % (9, 1)": "padded too wide",
    "'%(a)1000d' % {'a': 1}": "padded too wide",
    "'%1000d' | format(1)": "padded too wide",
    "'{:1000}'.format(1)": "padded too wide",
    "'{a:1000}'.format(a=1)": "padded too wide",
    "'{:{}}'.format(1, 9)": "padded too wide",
    "'{a:1000}'.format_map({'a': 1})": "padded too wide",
    "1.5 | round(301)": "too large by round",
    "1.5 | round(precision=-301)": "too large by round",
    "items | sum(start='')": "a list by sum",
    "[[1]] | sum(start=[])": "a list by sum",
    "[[1]] | sum(none, ())": "a list by sum",
    "10 ** 2000": "too large by",
    "(2 ** 2000) * (2 ** 2000) * (2 ** 2000)": "a number that is too large",
    "('9' * 2000) | int": "a number that is too large",
    "range(100001)": "ranges of more than 100000 items",
    "[range(60000), range(60000)]": "ranges of more than 100000 items",
    "[1] | tojson(indent=65)": "an indent of more than 64",
    "[1] | tojson(separators=(long, ':'))": "an indent of more than 64",
    "strftime_now('%9d')": "too long or has a width",
    "strftime_now('%Y' * 101)": "too long or has a width",
}

TAKEN = (
    "x.center(10000)",
    "'%999d' % 1",
    "'%(a)999d' % {'a': 1}",
    "'{:999}'.format(1)",
    "1.5 | round(300)",
    "1.5 | round(-300)",
    "numbers | sum(start=1)",
    "2 ** 2048",
    "range(100000)",
    "[1] | tojson(indent=64)",
    "[1] | tojson(separators=(',', ':'))",
    "strftime_now('%Y' * 100)",
)


@pytest.mark.parametrize("expression", REFUSED)
def test_what_no_prompt_needs_is_refused(expression):
    with pytest.raises(InvalidRequestError, match=re.escape(REFUSED[expression])):
        paid(expression, **VALUES)


@pytest.mark.parametrize("expression", TAKEN)
def test_a_little_less_is_taken(expression):
    assert paid(expression, **VALUES) < 2**26


@pytest.mark.parametrize(
    "expression",
    [
        "long * -1000000",
        "-1000000 * items",
        "x.center(-1000000)",
        "x | center(-1000000)",
        "tabs.expandtabs(-1000)",
        "lines | indent(-1000)",
        "numbers | batch(-1000000) | list",
    ],
)
def test_nothing_gives_units_back(expression):
    assert paid(expression, **VALUES) >= paid("x", **VALUES)


def test_a_templates_own_error_is_cut():
    template = TemplateEnvironment(lambda: NOW, None).template("{{ raise_exception(text) }}")
    with pytest.raises(TemplateError) as caught:
        template.render(text="e" * 2001)
    assert str(caught.value) == "e" * 2000


@pytest.mark.parametrize(
    "source",
    ["{% set n = namespace(_a=1) %}", "{% set n = namespace() %}{% set n._a = 1 %}"],
    ids=["at first", "later"],
)
def test_a_namespace_takes_no_name_with_an_underscore_first(source):
    with pytest.raises(TemplateError, match="'_a'"):
        TemplateEnvironment(lambda: NOW, None).template(source).render()


@pytest.mark.parametrize("expression", MADE)
def test_who_makes_much_pays_first(expression):
    assert paid(expression, **VALUES) - paid("x", **VALUES) >= MADE[expression]


@pytest.mark.parametrize("expression", LOOKED_AT)
def test_who_looks_at_much_pays_first(expression):
    assert paid(expression, **VALUES) - paid("x", **VALUES) >= LOOKED_AT[expression]
