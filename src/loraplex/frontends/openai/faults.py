"""Several faults of one request in one error: a client mends them at once."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from loraplex.core.errors import RequestError

MAX_FAULTS: Final = 10
"""Faults that one error lists."""


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check, and raise one error for all RequestErrors that they raise."""
    raise_errors(list(filter(None, map(_error_of, checks))))


def raise_errors(errors: Sequence[RequestError]) -> None:
    """Raise one error for all of these; none, if there are none."""
    if errors:
        raise joined(errors)


def joined(errors: Sequence[RequestError]) -> RequestError:
    """Return an error of the first one's class and parameter that lists them all."""
    first = errors[0]
    # An error that lists several already has each as a note.
    faults = (getattr(error, "__notes__", None) or [error.message] for error in errors)
    messages = list(dict.fromkeys(itertools.chain.from_iterable(faults)))
    if len(messages) == 1:
        return first
    more = len(messages) - MAX_FAULTS
    listed = "; ".join(f"({n}) {text}" for n, text in enumerate(messages[:MAX_FAULTS], 1))
    rest = f"; and {more} more" if more > 0 else ""
    message = f"the request has {len(messages)} faults: {listed}{rest}"
    error = type(first)(message, param=first.param)
    for text in messages:
        error.add_note(text)
    return error


def _error_of(check: Callable[[], object]) -> RequestError | None:
    try:
        check()
    except RequestError as error:
        return error
    return None
