"""What one rendering of a chat template may cost: time and memory as one number.

A unit is about a byte made or read, or two nanoseconds of computing. Every operation pays before it
runs, by an upper bound of what it can take, so a template that pays is done soon and is small.
"""

import contextlib
import contextvars
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.utils import Namespace

from loraplex.core.errors import InvalidRequestError

_BASE_WORK = 2**27
_WORK_PER_MESSAGE = 2**19
_MAX_WORK = 2**29
"""A conversation of 1000 messages takes a twentieth of its allowance with most templates, and a
half with those that look at all messages for each."""

ITEM = 64
"""Units of an item in a container, and of one step of a template's code."""

CALL = 8 * ITEM
"""Units of calling a filter, a method or a function of Python's."""

MACRO = 32 * ITEM
"""Units of calling a macro or a block."""

_MAX_NUMBER_BITS = 4096
_POINTER = 8


class Meter:
    """The allowance of one rendering."""

    def __init__(self, num_messages: int = 1) -> None:
        self._left = min(_BASE_WORK + _WORK_PER_MESSAGE * num_messages, _MAX_WORK)
        self._weights: dict[int, tuple[object, int]] = {}
        """By id, with the object, so that the id stays its own. Templates cannot change lists,
        tuples or dicts."""

    def pay(self, units: int) -> None:
        """Raises InvalidRequestError if the allowance is used up."""
        self._left -= units
        if self._left < 0:
            raise too_large("more work than any conversation needs")

    def weight(self, value: Any) -> int:
        """Units of a value and all in it, each as often as it is found: what it takes to write
        the value, to compare it or to hash it."""
        if isinstance(value, str):
            return value.__sizeof__()
        if isinstance(value, list | tuple | dict):
            return self._known_weight(value)
        if isinstance(value, range):
            return ITEM * len(value)
        if isinstance(value, Namespace):
            # Its repr has all that it will ever hold, and it changes: there is no bound to give.
            raise too_large("text of a namespace")
        if isinstance(value, ItemsView | KeysView | ValuesView):
            return ITEM + sum(self.weight(item) + _POINTER for item in value)
        return ITEM

    def _known_weight(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> int:
        known = self._weights.get(id(value))
        if known is None:
            items: Iterable[Any] = value
            if isinstance(value, dict):
                items = (part for pair in value.items() for part in pair)
            self.pay(ITEM * len(value))
            total = ITEM + sum(self.weight(item) + _POINTER for item in items)
            known = self._weights[id(value)] = (value, total)
        return known[1]

    def note_joined(self, joined: list[Any], left: list[Any], right: list[Any]) -> None:
        """`joined` is left + right: its weight needs no walk."""
        weight = self.weight(left) + self.weight(right)
        self._weights[id(joined)] = (joined, weight)

    def pay_for_text(self, value: Any) -> None:
        """For str(value); repr writes up to four characters for one byte of a string."""
        self.pay(self.weight(value) * (1 if isinstance(value, str) else 4))

    def paid(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each of which costs."""
        for item in items:
            self.pay(ITEM)
            yield item


def too_large(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template makes {what}", param="messages")


def shallow_weight(value: Any) -> int:
    """Units to copy or walk a value, not what is in it."""
    if isinstance(value, str):
        return value.__sizeof__()
    if isinstance(value, list | tuple | Mapping | range):
        return ITEM * (len(value) + 1)
    return ITEM


def checked_number(value: Any) -> Any:
    """The value; raises InvalidRequestError for an int that nothing in a prompt needs."""
    if isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
        raise too_large("a number that is too large")
    return value


def check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        bits = base.bit_length() * exponent
        if bits > _MAX_NUMBER_BITS:
            raise too_large("a number that is too large by '**'")


_meter: contextvars.ContextVar[Meter] = contextvars.ContextVar("template_meter")


def current_meter() -> Meter:
    """The one of the rendering that runs; a fresh one outside of any."""
    return _meter.get(None) or Meter()


@contextlib.contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Within it, templates of this thread or task pay from this meter."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)
